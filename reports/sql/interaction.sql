-- Grain: one row per metric and seed. The 2 x 2 of prefix caching and speculation, all else equal (every setting is compared;
-- both caching scenarios cache alike, both speculating ones speculate alike): neither (the baseline), each alone, both, in ms,
-- over the requests that all four completed (requests). interaction_ms = (both - neither) - [(caching - neither) +
-- (speculation - neither)]; above 0: the two together save less than the sum of what each saves alone. No rows unless the
-- study holds all four; the first such four in the study's order.
WITH like_baseline AS (
    SELECT s.*, s.speculation <> 'none' AS speculating
    FROM scenarios AS s
    JOIN scenarios AS b ON b.is_baseline
    WHERE s.settings_rest = b.settings_rest
),
cells AS (
    SELECT n.scenario AS neither, c.scenario AS caching, s.scenario AS speculation, b.scenario AS both_on
    FROM like_baseline AS n, like_baseline AS c, like_baseline AS s, like_baseline AS b
    WHERE n.is_baseline AND NOT n.prefix_caching AND NOT n.speculating
        AND c.prefix_caching AND NOT c.speculating
        AND NOT s.prefix_caching AND s.speculating
        AND b.settings_cache = c.settings_cache AND b.settings_speculation = s.settings_speculation
    ORDER BY c.position, s.position, b.position
    LIMIT 1
),
shared AS (
    SELECT request, seed
    FROM outcomes, cells
    WHERE scenario IN (neither, caching, speculation, both_on) AND status = 'completed'
    GROUP BY request, seed
    HAVING count(*) = 4
),
metrics AS (
    SELECT
        scenario, seed, count(*) AS requests,
        avg(ttft_ms) AS "TTFT mean", quantile_cont(ttft_ms, 0.95) AS "TTFT p95",
        avg(tpot_ms) AS "TPOT mean", quantile_cont(tpot_ms, 0.95) AS "TPOT p95",
        avg(e2e_ms) AS "E2E mean", quantile_cont(e2e_ms, 0.95) AS "E2E p95"
    FROM outcomes
    JOIN shared USING (request, seed)
    GROUP BY scenario, seed
),
long AS (
    UNPIVOT metrics ON "TTFT mean", "TTFT p95", "TPOT mean", "TPOT p95", "E2E mean", "E2E p95" INTO NAME metric VALUE ms
)
SELECT
    long.metric,
    seed,
    any_value(requests) AS requests,
    max(ms) FILTER (scenario = neither) AS neither_ms,
    max(ms) FILTER (scenario = caching) AS caching_ms,
    max(ms) FILTER (scenario = speculation) AS speculation_ms,
    max(ms) FILTER (scenario = both_on) AS both_ms,
    (both_ms - neither_ms) - ((caching_ms - neither_ms) + (speculation_ms - neither_ms)) AS interaction_ms
FROM long, cells
WHERE scenario IN (neither, caching, speculation, both_on)
GROUP BY long.metric, seed
ORDER BY list_position(['TTFT mean', 'TTFT p95', 'TPOT mean', 'TPOT p95', 'E2E mean', 'E2E p95'], long.metric), seed;
