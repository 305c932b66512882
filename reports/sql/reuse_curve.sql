-- Grain: one row per sampled capacity (about 12 per doubling). LRU hits of one cache for the whole trace, zero time:
-- cache_gib of KV at the baseline's model and KV type, over all GPUs that hold it; reuse_ratio and miss_ratio in tokens.
WITH kv AS (
    SELECT kv_bytes_per_token * tensor_parallel AS bytes_per_token FROM scenarios WHERE is_baseline
),
sampled AS (
    SELECT max_by(reuse_curve, capacity_blocks) AS point
    FROM reuse_curve
    WHERE capacity_blocks > 0
    GROUP BY floor(12 * log2(capacity_blocks))
)
SELECT
    point.capacity_blocks AS capacity_blocks,
    point.capacity_tokens * bytes_per_token / 1024 ^ 3 AS cache_gib,
    point.hit_tokens / point.all_tokens AS reuse_ratio,
    1 - point.hit_tokens / point.all_tokens AS miss_ratio
FROM sampled, kv
ORDER BY capacity_blocks;
