-- Grain: one row per latency that the log observed. Baseline's prediction against the log, ms, over requests that have both.
WITH pairs AS (
    SELECT 'TTFT' AS latency, observed_ttft_ms AS observed, ttft_ms AS predicted FROM outcomes WHERE scenario = 'baseline'
    UNION ALL
    SELECT 'TPOT', observed_tpot_ms, tpot_ms FROM outcomes WHERE scenario = 'baseline'
    UNION ALL
    SELECT 'E2E', observed_e2e_ms, e2e_ms FROM outcomes WHERE scenario = 'baseline'
)
SELECT
    latency,
    count(*) AS requests,
    avg(observed) AS observed_mean_ms,
    avg(predicted) AS predicted_mean_ms,
    quantile_cont(observed, 0.5) AS observed_p50_ms,
    quantile_cont(predicted, 0.5) AS predicted_p50_ms,
    quantile_cont(observed, 0.95) AS observed_p95_ms,
    quantile_cont(predicted, 0.95) AS predicted_p95_ms,
    median(abs(predicted - observed) / observed) AS median_absolute_error
FROM pairs
WHERE observed IS NOT NULL AND predicted IS NOT NULL
GROUP BY latency
ORDER BY list_position(['TTFT', 'TPOT', 'E2E'], latency);
