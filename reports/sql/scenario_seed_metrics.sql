-- Grain: one row per scenario and seed. Times in ms unless named _s; ratios are sums over sums; percentiles are exact
-- (linear interpolation) over completed requests. goodput_rps: completed requests within every service level, per second of
-- the measured span (from the first arrival, or the end of the warm-up, to the last finish). meets_slo: of all requests, refused ones included, at least the study's
-- percentile is within each limit. hit_tokens is null where the trace doesn't tell prefixes apart.
WITH limits AS (
    SELECT
        percentile / 100 AS share,
        coalesce(ttft_ms, 'infinity'::DOUBLE) AS ttft_limit,
        coalesce(tpot_ms, 'infinity'::DOUBLE) AS tpot_limit,
        coalesce(e2e_ms, 'infinity'::DOUBLE) AS e2e_limit
    FROM slo
),
per_seed AS (
    SELECT
        scenario,
        seed,
        count(*) AS requests,
        count(*) FILTER (status = 'completed') AS completed,
        count(*) FILTER (status = 'refused') AS refused,
        count(*) FILTER (clipped) AS clipped,
        max(arrival_s + e2e_ms / 1000) - any_value(warmup_end_s) AS span_s,
        sum(input_tokens) FILTER (status = 'completed') AS input_tokens,
        sum(output_tokens) AS output_tokens,
        CASE WHEN bool_and(hit_tokens IS NOT NULL OR status = 'refused') THEN sum(hit_tokens) END AS hit_tokens,
        sum(recomputed_tokens) AS recomputed_tokens,
        sum(preemptions) AS preemptions,
        avg(ttft_ms) AS ttft_mean,
        quantile_cont(ttft_ms, 0.50) AS ttft_p50,
        quantile_cont(ttft_ms, 0.95) AS ttft_p95,
        quantile_cont(ttft_ms, 0.99) AS ttft_p99,
        avg(tpot_ms) AS tpot_mean,
        quantile_cont(tpot_ms, 0.50) AS tpot_p50,
        quantile_cont(tpot_ms, 0.95) AS tpot_p95,
        avg(e2e_ms) AS e2e_mean,
        quantile_cont(e2e_ms, 0.50) AS e2e_p50,
        quantile_cont(e2e_ms, 0.95) AS e2e_p95,
        count(*) FILTER (ttft_ms <= ttft_limit) >= any_value(share) * count(*)
            AND count(*) FILTER (status = 'completed' AND coalesce(tpot_ms, 0) <= tpot_limit) >= any_value(share) * count(*)
            AND count(*) FILTER (e2e_ms <= e2e_limit) >= any_value(share) * count(*) AS meets_slo,
        count(*) FILTER (
            status = 'completed' AND ttft_ms <= ttft_limit AND coalesce(tpot_ms, 0) <= tpot_limit AND e2e_ms <= e2e_limit
        ) AS within_slo,
        sum(spec_steps) AS spec_steps,
        sum(draft_tokens) AS draft_tokens,
        sum(accepted_tokens) AS accepted_tokens
    FROM outcomes
    JOIN (SELECT scenario, warmup_s / rate AS warmup_end_s FROM scenarios) USING (scenario), limits
    GROUP BY scenario, seed
)
SELECT
    scenarios.position,
    scenario,
    seed,
    gpus,
    requests,
    completed,
    refused,
    clipped,
    span_s,
    input_tokens,
    output_tokens,
    hit_tokens,
    hit_tokens / input_tokens AS reuse_ratio,
    recomputed_tokens,
    preemptions,
    ttft_mean, ttft_p50, ttft_p95, ttft_p99,
    tpot_mean, tpot_p50, tpot_p95,
    e2e_mean, e2e_p50, e2e_p95,
    output_tokens / span_s / gpus AS output_tokens_per_s_per_gpu,
    completed / span_s AS throughput_rps,
    within_slo / span_s AS goodput_rps,
    within_slo / requests AS within_slo_share,
    meets_slo,
    gpus * 24.0 AS gpu_hours_per_day,
    per_seed.draft_tokens AS draft_tokens,
    accepted_tokens,
    CASE WHEN spec_steps > 0 THEN 1 + accepted_tokens / spec_steps END AS acceptance_length,
    CASE WHEN per_seed.draft_tokens > 0 THEN accepted_tokens / per_seed.draft_tokens END AS acceptance_rate
FROM per_seed
JOIN scenarios USING (scenario)
ORDER BY scenarios.position, seed;
