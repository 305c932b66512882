-- Grain: one row. The study's service levels: percentile in per cent, limits in ms, null = no limit.
SELECT percentile, ttft_ms, tpot_ms, e2e_ms FROM slo;
