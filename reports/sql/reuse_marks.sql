-- Grain: one row per mark on the reuse curve: the installed KV pool of one replica and of the whole fleet, and the smallest
-- cache at the ceiling. GiB and tokens of KV at the baseline's model; reuse_ratio = LRU hits at that capacity, tokens.
WITH kv AS (
    SELECT kv_bytes_per_token * tensor_parallel AS bytes_per_token, pool_tokens, replicas
    FROM scenarios WHERE is_baseline
),
sizes AS (
    SELECT 'one replica' AS mark, 1 AS mark_order, pool_tokens AS tokens FROM kv
    UNION ALL
    SELECT 'whole fleet', 2, pool_tokens * replicas FROM kv
    UNION ALL
    SELECT 'ceiling', 3, (SELECT max(capacity_tokens) FROM reuse_curve)
)
SELECT
    mark,
    mark_order,
    tokens,
    tokens * bytes_per_token / 1024 ^ 3 AS cache_gib,
    reuse_curve.hit_tokens / reuse_curve.all_tokens AS reuse_ratio
FROM (SELECT * FROM sizes WHERE EXISTS (SELECT 1 FROM reuse_curve)) AS sizes
ASOF JOIN reuse_curve ON sizes.tokens >= reuse_curve.capacity_tokens
CROSS JOIN kv
ORDER BY mark_order;
