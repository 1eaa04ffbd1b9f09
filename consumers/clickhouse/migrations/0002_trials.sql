-- One row per offered trial: the base of every denominator. Built from GroupOffered, so that a trial that was lost
-- before it began still counts. `reward` is the latest grade of the winning attempt; `solved` needs that grade to be
-- full and the admission table to keep it. Columns of what has not happened yet are NULL.
CREATE OR REPLACE VIEW trials AS
WITH
    offers AS
    (
        SELECT
            run_id, purpose, step, epoch, policy_version, group_id, task_id, occurred_at AS offered_at,
            trial_id, trial_number - 1 AS trial_index
        FROM (SELECT * FROM group_offered FINAL LIMIT 1 BY group_id)
        ARRAY JOIN trial_ids AS trial_id, arrayEnumerate(trial_ids) AS trial_number
    ),
    sets AS
    (
        SELECT task_id, toNullable(argMax(toString(task_set), occurred_at)) AS task_set
        FROM task_registered FINAL GROUP BY task_id
    ),
    leases AS
    (
        SELECT trial_id, toNullable(min(occurred_at)) AS leased_at FROM trial_leased FINAL GROUP BY trial_id
    ),
    ends AS
    (
        SELECT
            trial_id,
            toNullable(any(occurred_at)) AS finished_at,
            toNullable(any(toString(termination_reason))) AS termination_reason,
            toNullable(any(attempt)) AS attempt,
            toNullable(any(num_attempts)) AS num_attempts,
            any(num_calls) AS num_calls
        FROM trial_finished FINAL GROUP BY trial_id
    ),
    grades AS
    (
        SELECT
            trial_id, attempt,
            toNullable(argMax(reward, (grade_attempt, occurred_at))) AS reward,
            toNullable(uniqExact(event_id)) AS num_grades
        FROM reward_graded FINAL GROUP BY trial_id, attempt
    ),
    admissions AS
    (
        SELECT
            trial_id, toNullable(admitted) AS admitted, toNullable(rule) AS rule, training_reward,
            toNullable(num_sampled_tokens) AS num_sampled_tokens, min_version, max_version
        FROM
        (
            SELECT
                trial_id, true AS admitted, toString(rule) AS rule, toNullable(reward) AS training_reward,
                num_sampled_tokens, min_version, max_version
            FROM trajectory_admitted FINAL
            UNION ALL
            SELECT
                trial_id, false AS admitted, toString(rule) AS rule, NULL AS training_reward,
                num_sampled_tokens, min_version, max_version
            FROM trajectory_rejected FINAL
        )
        LIMIT 1 BY trial_id
    )
SELECT
    offers.run_id AS run_id,
    offers.purpose AS purpose,
    sets.task_set AS task_set,
    offers.step AS step,
    offers.epoch AS epoch,
    offers.policy_version AS policy_version,
    offers.group_id AS group_id,
    offers.task_id AS task_id,
    offers.trial_id AS trial_id,
    offers.trial_index AS trial_index,
    multiIf(ends.finished_at IS NOT NULL, 'finished', leases.leased_at IS NOT NULL, 'running', 'waiting') AS state,
    offers.offered_at AS offered_at,
    leases.leased_at AS leased_at,
    ends.finished_at AS finished_at,
    ends.termination_reason AS termination_reason,
    ends.attempt AS attempt,
    ends.num_attempts AS num_attempts,
    ends.num_calls AS num_calls,
    grades.reward AS reward,
    grades.num_grades AS num_grades,
    admissions.admitted AS admitted,
    admissions.rule AS rule,
    admissions.training_reward AS training_reward,
    admissions.num_sampled_tokens AS num_sampled_tokens,
    admissions.min_version AS min_version,
    admissions.max_version AS max_version,
    ifNull(admissions.rule = 'keep' AND grades.reward >= 1, false) AS solved
FROM offers
LEFT JOIN sets ON offers.task_id = sets.task_id
LEFT JOIN leases ON offers.trial_id = leases.trial_id
LEFT JOIN ends ON offers.trial_id = ends.trial_id
LEFT JOIN grades ON offers.trial_id = grades.trial_id AND ends.attempt = grades.attempt
LEFT JOIN admissions ON offers.trial_id = admissions.trial_id
