-- Grain: one row per scenario with prefix caching and bin of the share of the prompt that was hit. Median TTFT in ms of these
-- requests, there and in the baseline (the same requests, paired by seed): a hit ratio is not a TTFT ratio.
SELECT
    scenarios.position,
    mine.scenario AS scenario,
    CASE
        WHEN mine.hit_tokens = 0 THEN 'cold: no hit'
        WHEN mine.hit_tokens < 0.1 * mine.input_tokens THEN 'under 10 %'
        WHEN mine.hit_tokens < 0.5 * mine.input_tokens THEN '10 to 50 %'
        ELSE 'warm: 50 % and more'
    END AS prompt_hit,
    count(*) AS requests,
    median(mine.ttft_ms) AS ttft_p50_ms,
    median(base.ttft_ms) AS baseline_ttft_p50_ms,
    avg(mine.ttft_ms - base.ttft_ms) AS mean_change_ms
FROM outcomes AS mine
JOIN outcomes AS base ON base.request = mine.request AND base.seed = mine.seed AND base.scenario = 'baseline'
JOIN scenarios ON scenarios.scenario = mine.scenario
WHERE scenarios.prefix_caching AND mine.status = 'completed' AND base.status = 'completed' AND mine.hit_tokens IS NOT NULL
GROUP BY ALL
ORDER BY scenarios.position, min(mine.hit_tokens / mine.input_tokens);
