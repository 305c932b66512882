-- Grain: one row per scenario: its fullest interval (most requests waiting and running together), first seed. minute: start.
SELECT
    scenarios.position,
    scenario,
    arg_max(start_s, load) / 60 AS minute,
    max(load) AS requests_in_system,
    arg_max(waiting, load) AS waiting,
    arg_max(kv_used_share, load) AS kv_used_share
FROM (
    SELECT
        scenario,
        start_s,
        sum(waiting_mean) AS waiting,
        sum(waiting_mean + running_mean) AS load,
        sum(kv_used_blocks_mean) / any_value(pool_blocks * replicas) AS kv_used_share
    FROM timeline
    JOIN scenarios USING (scenario)
    WHERE seed = (SELECT min(seed) FROM timeline)
    GROUP BY scenario, start_s
)
JOIN scenarios USING (scenario)
GROUP BY scenario, scenarios.position
ORDER BY scenarios.position;
