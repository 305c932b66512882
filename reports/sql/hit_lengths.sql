-- Grain: one row per series and bin of hit length L_hit. series: the unbounded zero-time cache, or a scenario with prefix
-- caching (mean over seeds). from_tokens and below_tokens bound the bin (0 = no hit at all); share of requests.
WITH lengths AS (
    SELECT 'unbounded cache' AS series, 0 AS series_order, 1 AS seeds, hit_tokens
    FROM reuse_requests
    UNION ALL
    SELECT scenario, position + 1, (SELECT count(DISTINCT seed) FROM outcomes), hit_tokens
    FROM outcomes
    JOIN scenarios USING (scenario)
    WHERE prefix_caching AND status = 'completed' AND hit_tokens IS NOT NULL
),
binned AS (
    SELECT *, CASE WHEN hit_tokens = 0 THEN -1 ELSE greatest(8, floor(log2(hit_tokens)))::INTEGER END AS bin
    FROM lengths
)
SELECT
    series,
    series_order,
    CASE WHEN bin = -1 THEN 0 WHEN bin = 8 THEN 1 ELSE 2 ^ bin END::BIGINT AS from_tokens,
    CASE WHEN bin = -1 THEN 1 ELSE 2 ^ (bin + 1) END::BIGINT AS below_tokens,
    count(*) / any_value(seeds) AS requests,
    count(*) / sum(count(*)) OVER (PARTITION BY series) AS share
FROM binned
GROUP BY series, series_order, bin
ORDER BY series_order, bin;
