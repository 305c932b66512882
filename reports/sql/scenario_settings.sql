-- Grain: one row per scenario. Its configuration; pool_tokens per replica, memory per GPU in GiB.
SELECT
    position, scenario, is_baseline, changes, gpu, replicas, tensor_parallel, gpus, router, model, weight_dtype, kv_dtype,
    block_tokens, max_batched_tokens, max_sequences, max_model_len, prefix_caching, speculation, draft_tokens,
    acceptance_length, acceptance_source, rate, warmup_s, turns_with_reply, spread_tick_s, settings_rest,
    usable_gib, weights_gib, draft_weights_gib, activations_gib, reserve_gib, kv_gib, pool_tokens
FROM scenarios
ORDER BY position;
