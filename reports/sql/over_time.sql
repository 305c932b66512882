-- Grain: one row per scenario and interval, first seed, all replicas together; at most about 120 intervals (wider ones are
-- joined). minute: start, minutes from the first arrival. waiting, running: requests, mean over the interval. kv_used_share and
-- kv_cached_share: of the fleet's KV blocks. Rates are per second.
WITH width AS (
    SELECT max(interval) + 1 AS intervals, greatest(1, ceil((max(interval) + 1) / 120))::INTEGER AS joined FROM timeline
)
SELECT
    scenarios.position,
    scenario,
    min(start_s) / 60 AS minute,
    sum(arrivals) / (any_value(interval_s) * count(DISTINCT interval)) AS arrivals_per_s,
    sum(waiting_mean) / count(DISTINCT interval) AS waiting,
    sum(running_mean) / count(DISTINCT interval) AS running,
    sum(kv_used_blocks_mean) / count(DISTINCT interval) / any_value(pool_blocks * replicas) AS kv_used_share,
    sum(kv_cached_blocks_mean) / count(DISTINCT interval) / any_value(pool_blocks * replicas) AS kv_cached_share,
    sum(hit_tokens) / nullif(sum(hit_tokens) + sum(prefill_tokens), 0) AS hit_share_of_prefill,
    sum(preemptions) AS preemptions
FROM timeline
JOIN scenarios USING (scenario)
CROSS JOIN width
WHERE seed = (SELECT min(seed) FROM timeline)
GROUP BY scenarios.position, scenario, interval // joined
ORDER BY scenarios.position, minute;
