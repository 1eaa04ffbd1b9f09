-- One row per learner step, flat.
CREATE OR REPLACE VIEW steps AS
SELECT
    run_id, step, occurred_at, version_before, version_after, length(group_ids) AS num_groups,
    num_informative_groups, num_trajectories, num_tokens, num_stale_tokens, reward_mean, learning_rate, grad_norm,
    algorithm, loss.loss AS loss, loss.policy_loss AS policy_loss, loss.kl_loss AS kl_loss, loss.entropy AS entropy,
    loss.ratio_mean AS ratio_mean, loss.clip_fraction AS clip_fraction, loss.advantage_mean AS advantage_mean,
    loss.advantage_std AS advantage_std, timing.wait_sec AS wait_sec,
    timing.forward_backward_sec AS forward_backward_sec, timing.optimizer_sec AS optimizer_sec,
    timing.checkpoint_sec AS checkpoint_sec, timing.total_sec AS total_sec, checkpoint_path
FROM (SELECT * FROM step_completed FINAL LIMIT 1 BY run_id, step)
-- next statement
-- Agreement of rollout and training, per step and policy version (-1: all versions together).
CREATE OR REPLACE VIEW fidelity AS
SELECT
    run_id, step, occurred_at, f.version AS version, f.num_tokens AS num_tokens, f.pearson AS pearson,
    f.mean_abs_dlogp AS mean_abs_dlogp, f.max_abs_dlogp AS max_abs_dlogp, f.k3_kl AS k3_kl, f.ess AS ess,
    f.histogram AS histogram, f.replay_overlap AS replay_overlap,
    f.replay_top1_agreement AS replay_top1_agreement, f.replay_coverage AS replay_coverage
FROM (SELECT run_id, step, occurred_at, fidelity FROM step_completed FINAL LIMIT 1 BY run_id, step)
ARRAY JOIN fidelity AS f
-- next statement
-- Groups as the learner sees them: how many of G trials were solved, and how many groups have no gradient.
-- `solved_histogram[k + 1]` counts groups of which k trials got a full reward.
CREATE OR REPLACE VIEW group_distribution AS
SELECT
    run_id, purpose, step,
    count() AS num_groups,
    countIf(dropped) AS num_dropped,
    countIf(NOT dropped AND zero_variation) AS num_zero_variation,
    num_zero_variation / nullIf(countIf(NOT dropped), 0) AS zero_variation_share,
    countIf(num_solved = 0) AS num_none_solved,
    countIf(num_solved = group_size) AS num_all_solved,
    arrayMap(k -> countEqual(groupArray(num_solved), k), range(toUInt64(max(group_size)) + 1)) AS solved_histogram,
    groupUniqArrayIf(reason, dropped) AS drop_reasons
FROM
(
    SELECT * FROM
    (
    SELECT
        run_id, purpose, step, group_id, false AS dropped, '' AS reason, zero_variation,
        length(members) AS group_size, countEqual(members.reward, 1) AS num_solved
    FROM group_ready FINAL
    UNION ALL
    SELECT
        run_id, purpose, step, group_id, true AS dropped, reason, false AS zero_variation,
        length(members) AS group_size, countEqual(members.reward, 1) AS num_solved
    FROM group_dropped FINAL
    )
    ORDER BY dropped LIMIT 1 BY group_id
)
GROUP BY run_id, purpose, step
-- next statement
-- How long trials wait for a worker, and how old their tokens are when they are trained.
CREATE OR REPLACE VIEW queue_staleness AS
WITH
    waits AS
    (
        SELECT
            run_id, step,
            count() AS num_trials,
            quantileExactIf(0.5)(wait_sec, wait_sec IS NOT NULL) AS queue_wait_p50_sec,
            quantileExactIf(0.95)(wait_sec, wait_sec IS NOT NULL) AS queue_wait_p95_sec,
            quantileExactIf(0.5)(trial_sec, trial_sec IS NOT NULL) AS trial_p50_sec,
            quantileExactIf(0.95)(trial_sec, trial_sec IS NOT NULL) AS trial_p95_sec
        FROM
        (
            SELECT
                run_id, step,
                dateDiff('millisecond', offered_at, leased_at) / 1000 AS wait_sec,
                dateDiff('millisecond', leased_at, finished_at) / 1000 AS trial_sec
            FROM trials WHERE purpose = 'train'
        )
        GROUP BY run_id, step
    ),
    trained AS
    (
        SELECT s.run_id AS run_id, s.step AS step, s.version_before AS version_before, m AS member
        FROM
        (
            SELECT run_id, step, version_before, group_id
            FROM (SELECT * FROM step_completed FINAL LIMIT 1 BY run_id, step) ARRAY JOIN group_ids AS group_id
        ) AS s
        INNER JOIN
        (
            SELECT group_id, m FROM (SELECT group_id, members FROM group_ready FINAL LIMIT 1 BY group_id)
            ARRAY JOIN members AS m
        ) AS g ON s.group_id = g.group_id
        WHERE m.admitted AND m.min_version IS NOT NULL
    ),
    ages AS
    (
        SELECT
            run_id, step,
            toNullable(sum((version_before - assumeNotNull(member.min_version)) * member.num_sampled_tokens)
                / nullIf(sum(member.num_sampled_tokens), 0)) AS staleness_mean,
            toNullable(max(version_before - assumeNotNull(member.min_version))) AS staleness_max,
            sumMap(map(toInt64(version_before - assumeNotNull(member.min_version)), toUInt64(1))) AS staleness_trials
        FROM trained GROUP BY run_id, step
    )
SELECT
    waits.run_id AS run_id, waits.step AS step, waits.num_trials AS num_trials,
    waits.queue_wait_p50_sec AS queue_wait_p50_sec, waits.queue_wait_p95_sec AS queue_wait_p95_sec,
    waits.trial_p50_sec AS trial_p50_sec, waits.trial_p95_sec AS trial_p95_sec,
    ages.staleness_mean AS staleness_mean, ages.staleness_max AS staleness_max,
    ages.staleness_trials AS staleness_trials
FROM waits LEFT JOIN ages ON waits.run_id = ages.run_id AND waits.step = ages.step
-- next statement
-- Weights from publication to each replica. A version without a row of an expected replica was not loaded there.
CREATE OR REPLACE VIEW weight_sync AS
SELECT
    p.run_id AS run_id, p.version AS version, p.step AS step, p.occurred_at AS published_at,
    l.replica AS replica, l.occurred_at AS loaded_at,
    dateDiff('millisecond', p.occurred_at, l.occurred_at) / 1000 AS sync_sec,
    l.load_sec AS load_sec, l.ok AS ok, l.manifest_ok AND p.manifest_sha256 = l.manifest AS manifest_agrees,
    l.canary_max_abs_dlogp AS canary_max_abs_dlogp, l.detail AS detail
FROM (SELECT * FROM policy_published FINAL ORDER BY occurred_at LIMIT 1 BY run_id, version) AS p
LEFT JOIN
(
    SELECT
        run_id, version, toNullable(toString(replica)) AS replica, toNullable(occurred_at) AS occurred_at,
        toNullable(load_sec) AS load_sec, toNullable(ok) AS ok, toNullable(true) AS manifest_ok,
        toNullable(manifest_sha256) AS manifest, canary_max_abs_dlogp, toNullable(detail) AS detail
    FROM policy_loaded FINAL LIMIT 1 BY event_id
) AS l ON p.run_id = l.run_id AND p.version = l.version
-- next statement
-- Alerts that were raised and not cleared.
CREATE OR REPLACE VIEW alerts_open AS
SELECT run_id, event_id, occurred_at, check, severity, subject, detail, value, threshold
FROM (SELECT * FROM alert_raised FINAL LIMIT 1 BY event_id)
WHERE event_id NOT IN (SELECT raised_event_id FROM alert_cleared FINAL)
