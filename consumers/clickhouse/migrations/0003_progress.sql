-- How far each step is: trials offered, waiting, running, finished, and how they ended.
CREATE OR REPLACE VIEW progress AS
SELECT
    run_id, purpose, step,
    uniqExact(group_id) AS num_groups,
    count() AS num_offered,
    countIf(state = 'waiting') AS num_waiting,
    countIf(state = 'running') AS num_running,
    countIf(state = 'finished') AS num_finished,
    countIf(termination_reason = 'env_setup_failed') AS num_setup_failures,
    countIf(solved) AS num_solved,
    sumMap(if(termination_reason IS NULL, map(), map(assumeNotNull(termination_reason), toUInt64(1)))) AS outcomes,
    min(offered_at) AS first_offered_at,
    max(finished_at) AS last_finished_at
FROM trials
GROUP BY run_id, purpose, step
-- next statement
-- Solve rate per step and task set. The denominator is what was offered: lost trials count as unsolved.
-- `solve_rate_finished` leaves out trials that have not ended yet, for looking while a step runs.
CREATE OR REPLACE VIEW solve_rate AS
SELECT
    run_id, purpose, task_set, step,
    min(policy_version) AS policy_version,
    count() AS num_offered,
    countIf(state = 'finished') AS num_finished,
    countIf(admitted) AS num_admitted,
    countIf(solved) AS num_solved,
    num_solved / num_offered AS solve_rate,
    if(num_finished > 0, num_solved / num_finished, NULL) AS solve_rate_finished,
    sqrt(solve_rate * (1 - solve_rate) / num_offered) AS standard_error
FROM trials
GROUP BY run_id, purpose, task_set, step
-- next statement
-- How trials end, per step: counts, and shares of the trials that ended.
CREATE OR REPLACE VIEW termination_mix AS
SELECT
    run_id, purpose, step, assumeNotNull(termination_reason) AS termination_reason,
    count() AS num_trials,
    num_trials / sum(num_trials) OVER (PARTITION BY run_id, purpose, step) AS share
FROM trials
WHERE termination_reason IS NOT NULL
GROUP BY run_id, purpose, step, termination_reason
-- next statement
-- Solve rate of each task over the steps that offered it.
CREATE OR REPLACE VIEW task_grid AS
SELECT
    run_id, purpose, task_set, task_id, step, epoch,
    count() AS num_offered,
    countIf(solved) AS num_solved,
    num_solved / num_offered AS solve_rate
FROM trials
GROUP BY run_id, purpose, task_set, task_id, step, epoch
