-- Grain: one row. The knee of the reuse curve: the capacity farthest above the straight line from no cache to the ceiling,
-- both axes linear and scaled to 1, since memory is paid for linearly (Satopaa et al., "Kneedle", 2011). GiB of KV; tokens.
WITH kv AS (
    SELECT kv_bytes_per_token * tensor_parallel AS bytes_per_token FROM scenarios WHERE is_baseline
),
points AS (
    SELECT
        capacity_tokens,
        hit_tokens,
        all_tokens,
        capacity_blocks / max(capacity_blocks) OVER () AS x,
        hit_tokens / nullif(max(hit_tokens) OVER (), 0) AS y
    FROM reuse_curve
    WHERE capacity_blocks > 0
)
SELECT
    arg_max(capacity_tokens, y - x) * any_value(bytes_per_token) / 1024 ^ 3 AS cache_gib,
    arg_max(hit_tokens, y - x) / any_value(all_tokens) AS reuse_ratio
FROM points, kv
HAVING count(*) > 0;
