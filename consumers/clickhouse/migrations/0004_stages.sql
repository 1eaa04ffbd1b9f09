-- Wall time of the stages over a whole run. `share` is of all stage time.
CREATE OR REPLACE VIEW stage_timing AS
SELECT
    run_id, stage,
    count() AS num_stages,
    countIf(outcome = 'failed') AS num_failed,
    countIf(outcome = 'timeout') AS num_timeouts,
    avg(duration_sec) AS mean_sec,
    sum(duration_sec) / sum(sum(duration_sec)) OVER (PARTITION BY run_id) AS share,
    quantileExact(0.5)(duration_sec) AS p50_sec,
    quantileExact(0.95)(duration_sec) AS p95_sec,
    quantileExact(0.99)(duration_sec) AS p99_sec,
    max(peak_memory_bytes) AS peak_memory_bytes
FROM (SELECT * FROM stage_finished FINAL LIMIT 1 BY event_id)
GROUP BY run_id, stage
-- next statement
-- The same per step.
CREATE OR REPLACE VIEW stage_timing_by_step AS
SELECT
    s.run_id AS run_id, t.purpose AS purpose, t.step AS step, s.stage AS stage,
    count() AS num_stages,
    countIf(s.outcome != 'ok') AS num_not_ok,
    avg(s.duration_sec) AS mean_sec,
    sum(s.duration_sec) / sum(sum(s.duration_sec)) OVER (PARTITION BY s.run_id, t.purpose, t.step) AS share,
    quantileExact(0.5)(s.duration_sec) AS p50_sec,
    quantileExact(0.95)(s.duration_sec) AS p95_sec,
    quantileExact(0.99)(s.duration_sec) AS p99_sec
FROM (SELECT run_id, trial_id, stage, outcome, duration_sec FROM stage_finished FINAL LIMIT 1 BY event_id) AS s
INNER JOIN
(
    SELECT purpose, step, trial_id
    FROM (SELECT * FROM group_offered FINAL LIMIT 1 BY group_id) ARRAY JOIN trial_ids AS trial_id
) AS t ON s.trial_id = t.trial_id
GROUP BY s.run_id, t.purpose, t.step, s.stage
-- next statement
-- Tokens and trials per minute of wall time.
CREATE OR REPLACE VIEW throughput AS
SELECT
    run_id, minute,
    sum(calls) AS num_calls,
    sum(failed) AS num_failed_calls,
    sum(prompt_tokens) AS num_new_prompt_tokens,
    sum(sampled_tokens) AS num_sampled_tokens,
    sum(trials) AS num_trials,
    num_sampled_tokens / 60 AS tokens_per_sec,
    num_trials / 60 AS trials_per_sec
FROM
(
    SELECT
        run_id, toStartOfMinute(occurred_at) AS minute, uniqExact(call_id) AS calls, 0 AS failed,
        sum(length(prompt_delta_ids)) AS prompt_tokens, sum(length(sampled_ids)) AS sampled_tokens, 0 AS trials
    FROM (SELECT run_id, occurred_at, call_id, prompt_delta_ids, sampled_ids FROM model_call_completed FINAL LIMIT 1 BY call_id)
    GROUP BY run_id, minute
    UNION ALL
    SELECT run_id, toStartOfMinute(occurred_at) AS minute, 0, uniqExact(call_id), 0, 0, 0
    FROM model_call_failed FINAL GROUP BY run_id, minute
    UNION ALL
    SELECT run_id, toStartOfMinute(occurred_at) AS minute, 0, 0, 0, 0, uniqExact(trial_id)
    FROM trial_finished FINAL GROUP BY run_id, minute
)
GROUP BY run_id, minute
