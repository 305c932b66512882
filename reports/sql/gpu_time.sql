-- Grain: one row per scenario and component of the steps' time. gpu_s: seconds of one replica's GPUs, summed over replicas,
-- mean over seeds; share: of the scenario's busy time.
WITH sums AS (
    SELECT
        scenario,
        sum(gemm_s) AS gemm,
        sum(attention_prefill_s) AS attention_prefill,
        sum(attention_decode_s) AS attention_decode,
        sum(communication_s) AS communication,
        sum(sampling_s) AS sampling,
        sum(draft_s) AS draft,
        sum(overhead_s) AS overhead,
        count(DISTINCT seed) AS seeds
    FROM timeline
    GROUP BY scenario
),
parts AS (
    UNPIVOT sums ON gemm, attention_prefill, attention_decode, communication, sampling, draft, overhead
    INTO NAME component VALUE seconds
)
SELECT
    scenarios.position,
    scenario,
    component,
    seconds / seeds AS gpu_s,
    seconds / sum(seconds) OVER (PARTITION BY scenario) AS share
FROM parts
JOIN scenarios USING (scenario)
ORDER BY scenarios.position, list_position(
    ['gemm', 'attention_prefill', 'attention_decode', 'communication', 'sampling', 'draft', 'overhead'], component
);
