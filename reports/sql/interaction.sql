-- Grain: one row per metric and seed. The 2 x 2 of prefix caching and speculation at otherwise equal settings: neither, each
-- alone, both, in ms. interaction_ms = (both - neither) - [(caching - neither) + (speculation - neither)]; above 0: the two
-- together save less than the sum of what each saves alone. No rows unless the study holds all four.
WITH like_baseline AS (
    SELECT s.scenario, s.prefix_caching, s.speculation <> 'none' AS speculating
    FROM scenarios AS s
    JOIN scenarios AS b ON b.is_baseline
    WHERE (s.gpu, s.replicas, s.tensor_parallel, s.model, s.weight_dtype, s.kv_dtype, s.block_tokens, s.max_batched_tokens,
           s.max_sequences, s.rate, s.router)
        = (b.gpu, b.replicas, b.tensor_parallel, b.model, b.weight_dtype, b.kv_dtype, b.block_tokens, b.max_batched_tokens,
           b.max_sequences, b.rate, b.router)
),
cells AS (
    SELECT
        (SELECT min(scenario) FROM like_baseline WHERE NOT prefix_caching AND NOT speculating) AS neither,
        (SELECT min(scenario) FROM like_baseline WHERE prefix_caching AND NOT speculating) AS caching,
        (SELECT min(scenario) FROM like_baseline WHERE NOT prefix_caching AND speculating) AS speculation,
        (SELECT min(scenario) FROM like_baseline WHERE prefix_caching AND speculating) AS both_on
),
metrics AS (
    SELECT
        scenario, seed,
        avg(ttft_ms) AS "TTFT mean", quantile_cont(ttft_ms, 0.95) AS "TTFT p95",
        avg(tpot_ms) AS "TPOT mean", quantile_cont(tpot_ms, 0.95) AS "TPOT p95",
        avg(e2e_ms) AS "E2E mean", quantile_cont(e2e_ms, 0.95) AS "E2E p95"
    FROM outcomes
    GROUP BY scenario, seed
),
long AS (
    UNPIVOT metrics ON "TTFT mean", "TTFT p95", "TPOT mean", "TPOT p95", "E2E mean", "E2E p95" INTO NAME metric VALUE ms
)
SELECT
    long.metric,
    seed,
    max(ms) FILTER (scenario = neither) AS neither_ms,
    max(ms) FILTER (scenario = caching) AS caching_ms,
    max(ms) FILTER (scenario = speculation) AS speculation_ms,
    max(ms) FILTER (scenario = both_on) AS both_ms,
    (both_ms - neither_ms) - ((caching_ms - neither_ms) + (speculation_ms - neither_ms)) AS interaction_ms
FROM long, cells
WHERE neither IS NOT NULL AND caching IS NOT NULL AND speculation IS NOT NULL AND both_on IS NOT NULL
GROUP BY long.metric, seed
ORDER BY list_position(['TTFT mean', 'TTFT p95', 'TPOT mean', 'TPOT p95', 'E2E mean', 'E2E p95'], long.metric), seed;
