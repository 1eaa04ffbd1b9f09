-- Where the sampled tokens of every call went. `place`: trajectory, an exclusion reason, losing_attempt (calls of an
-- attempt that did not win), calls_unknown (the trial's number of calls is unknown), trial_open (no trajectory yet),
-- no_tokens; unaccounted and twice are errors.
CREATE OR REPLACE VIEW call_accounting AS
WITH
    calls AS
    (
        SELECT run_id, trial_id, attempt, call_id, 'completed' AS kind, length(sampled_ids) AS num_tokens
        FROM model_call_completed FINAL
        UNION ALL
        SELECT run_id, trial_id, attempt, call_id, 'failed' AS kind, length(sampled_ids) AS num_tokens
        FROM model_call_failed FINAL
    ),
    assembled AS
    (
        SELECT trial_id, toNullable(attempt) AS attempt, segments.calls AS slices, excluded
        FROM trajectory_assembled FINAL LIMIT 1 BY trial_id
    ),
    trained AS
    (
        SELECT slice.call_id AS call_id, count() AS num_slices, sum(slice.sampled_end - slice.sampled_start) AS num_tokens
        FROM (SELECT arrayJoin(arrayFlatten(slices)) AS slice FROM assembled)
        GROUP BY call_id
    ),
    left_out AS
    (
        SELECT item.call_id AS call_id, toNullable(any(item.reason)) AS reason
        FROM (SELECT arrayJoin(excluded) AS item FROM assembled)
        GROUP BY call_id
    ),
    ends AS
    (
        SELECT trial_id, any(num_calls IS NULL) AS unknown FROM trial_finished FINAL GROUP BY trial_id
    )
SELECT
    calls.run_id AS run_id, calls.trial_id AS trial_id, calls.attempt AS attempt, calls.call_id AS call_id,
    calls.kind AS kind, calls.num_tokens AS num_tokens,
    trained.num_slices AS num_segments,
    multiIf(
        trained.num_slices + (left_out.reason IS NOT NULL) > 1, 'twice',
        trained.num_slices = 1, if(trained.num_tokens = calls.num_tokens, 'trajectory', 'unaccounted'),
        left_out.reason IS NOT NULL, assumeNotNull(left_out.reason),
        calls.num_tokens = 0, 'no_tokens',
        a.attempt IS NULL, 'trial_open',
        a.attempt != calls.attempt, 'losing_attempt',
        ends.unknown, 'calls_unknown',
        'unaccounted') AS place
FROM (SELECT * FROM calls LIMIT 1 BY call_id) AS calls
LEFT JOIN (SELECT trial_id, attempt FROM assembled) AS a ON calls.trial_id = a.trial_id
LEFT JOIN trained ON calls.call_id = trained.call_id
LEFT JOIN left_out ON calls.call_id = left_out.call_id
LEFT JOIN ends ON calls.trial_id = ends.trial_id
-- next statement
-- Each sampled token is in exactly one trajectory or excluded for a reason: `unaccounted` and `twice` must not appear.
CREATE OR REPLACE VIEW token_accounting AS
SELECT run_id, place, count() AS num_calls, sum(num_tokens) AS num_tokens
FROM call_accounting
GROUP BY run_id, place
-- next statement
-- From a step back to the calls it was trained on.
CREATE OR REPLACE VIEW lineage AS
SELECT
    s.run_id AS run_id, s.step AS step, s.version_after AS version_after, s.group_id AS group_id,
    g.task_id AS task_id, g.member.trial_id AS trial_id, g.member.admitted AS admitted, g.member.reward AS reward,
    g.member.termination_reason AS termination_reason, g.member.trajectory_event_id AS trajectory_event_id,
    t.conversation_id AS conversation_id, t.call_id AS call_id, t.num_sampled_tokens AS num_sampled_tokens
FROM
(
    SELECT run_id, step, version_after, group_id
    FROM (SELECT * FROM step_completed FINAL LIMIT 1 BY run_id, step) ARRAY JOIN group_ids AS group_id
) AS s
LEFT JOIN
(
    SELECT group_id, task_id, member FROM (SELECT * FROM group_ready FINAL LIMIT 1 BY group_id)
    ARRAY JOIN members AS member
) AS g ON s.group_id = g.group_id
LEFT JOIN
(
    SELECT
        trial_id, toNullable(segment.conversation_id) AS conversation_id, toNullable(slice.call_id) AS call_id,
        toNullable(slice.sampled_end - slice.sampled_start) AS num_sampled_tokens
    FROM
    (
        SELECT trial_id, segment, arrayJoin(segment.calls) AS slice
        FROM
        (
            SELECT trial_id, arrayJoin(segments) AS segment
            FROM (SELECT trial_id, segments FROM trajectory_assembled FINAL LIMIT 1 BY trial_id)
        )
    )
) AS t ON g.member.trial_id = t.trial_id
