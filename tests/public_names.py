"""The names that programs written for vLLM import: module -> names. Data of `test_public_names`."""

PUBLIC_NAMES: dict[str, tuple[str, ...]] = {
    "vllm": (
        *("LLM", "ModelRegistry", "PromptType", "TextPrompt", "TokensPrompt", "SamplingParams"),
        *("RequestOutput", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput"),
        *("EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput"),
        *("ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput", "LLMEngine"),
        *("EngineArgs", "AsyncLLMEngine", "AsyncEngineArgs", "initialize_ray_cluster"),
        *("PoolingParams", "__version__", "__version_tuple__"),
    ),
    "vllm.sampling_params": (
        *("SamplingParams", "GuidedDecodingParams", "BeamSearchParams", "RequestOutputKind"),
        "StructuredOutputsParams",
    ),
    "vllm.pooling_params": ("PoolingParams",),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.inputs": (
        *("TextPrompt", "TokensPrompt", "EmbedsPrompt", "ExplicitEncoderDecoderPrompt"),
        "PromptType",
    ),
    "vllm.outputs": ("RequestOutput", "CompletionOutput", "PoolingRequestOutput"),
    "vllm.sequence": ("Logprob", "RequestMetrics", "PromptLogprobs", "SampleLogprobs"),
    "vllm.engine.arg_utils": ("EngineArgs", "AsyncEngineArgs"),
    "vllm.engine.async_llm_engine": ("AsyncLLMEngine",),
    "vllm.engine.llm_engine": ("LLMEngine",),
    "vllm.v1.engine.async_llm": ("AsyncLLM",),
    "vllm.v1.engine.llm_engine": ("LLMEngine",),
    "vllm.usage.usage_lib": ("UsageContext",),
    "vllm.utils": ("FlexibleArgumentParser", "Counter", "random_uuid"),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
    "vllm.entrypoints.llm": ("LLM",),
    "vllm.entrypoints.api_server": ("main",),
    "vllm.entrypoints.cli.main": ("main",),
    "vllm.entrypoints.chat_utils": ("render_chat",),
    "vllm.entrypoints.openai.api_server": ("build_app", "run_server"),
    "vllm.entrypoints.openai.cli_args": ("make_arg_parser",),
    "vllm.entrypoints.openai.run_batch": ("main",),
    "vllm.entrypoints.openai.serving_models": ("BaseModelPath", "LoRAModulePath"),
    "vllm.entrypoints.openai.tool_parsers": (
        *("ToolParser", "ToolParserManager", "Granite20bFCToolParser", "GraniteToolParser"),
        *("Hermes2ProToolParser", "Internlm2ToolParser", "JambaToolParser", "MistralToolParser"),
        *("Llama3JsonToolParser", "Llama4PythonicToolParser", "PythonicToolParser"),
    ),
    "vllm.model_executor.models": ("ModelRegistry",),
    "vllm.reasoning": ("ReasoningParser", "ReasoningParserManager"),
    "vllm.assets.image": ("ImageAsset",),
    "vllm.assets.audio": ("AudioAsset",),
    "vllm.assets.video": ("VideoAsset",),
    "vllm.multimodal.utils": (
        *("fetch_image", "fetch_audio", "encode_image_base64", "encode_audio_base64"),
    ),
    "vllm.distributed": ("cleanup_dist_env_and_memory", "destroy_model_parallel"),
    "vllm.distributed.parallel_state": (
        *("cleanup_dist_env_and_memory", "destroy_distributed_environment"),
        "destroy_model_parallel",
    ),
    "vllm.platforms": ("current_platform",),
    "vllm.transformers_utils.tokenizer": ("get_tokenizer",),
    "vllm.config": ("VllmConfig", "ModelConfig", "CacheConfig", "SchedulerConfig"),
    "vllm.envs": ("VLLM_LOGGING_LEVEL", "VLLM_TARGET_DEVICE", "VLLM_API_KEY"),
    "vllm.logger": ("init_logger",),
    "vllm.version": ("__version__",),
}

_SAMPLING = """
    model n best_of frequency_penalty presence_penalty repetition_penalty temperature top_p top_k
    min_p seed stop stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens logit_bias
    allowed_token_ids prompt_logprobs return_tokens_as_token_ids use_beam_search length_penalty
    stream stream_options user echo priority response_format guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern logits_processors
    kv_transfer_params logprobs max_tokens add_special_tokens
"""
_USAGE = "id object created model usage"

PROTOCOL_FIELDS: dict[str, str] = {
    "OpenAIBaseModel": "",
    "ErrorInfo": "message type param code",
    "ErrorResponse": "error",
    "ModelPermission": "id object created allow_create_engine allow_sampling allow_logprobs "
    "allow_search_indices allow_view allow_fine_tuning organization group is_blocking",
    "ModelCard": "id object created owned_by root parent max_model_len permission",
    "ModelList": "object data",
    "PromptTokenUsageInfo": "cached_tokens",
    "UsageInfo": "prompt_tokens total_tokens completion_tokens prompt_tokens_details",
    "RequestResponseMetadata": "request_id final_usage_info",
    "JsonSchemaResponseFormat": "name description json_schema strict",
    "StructuralTag": "begin structural_tag_schema end",
    "StructuralTagResponseFormat": "type structures triggers",
    "ResponseFormat": "type json_schema",
    "StreamOptions": "include_usage continuous_usage_stats",
    "FunctionDefinition": "name description parameters",
    "ChatCompletionToolsParam": "type function",
    "ChatCompletionNamedFunction": "name",
    "ChatCompletionNamedToolChoiceParam": "type function",
    "LogitsProcessorConstructor": "qualname args kwargs",
    "ChatCompletionRequest": _SAMPLING
    + "messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls "
    "add_generation_prompt continue_final_message documents chat_template chat_template_kwargs "
    "mm_processor_kwargs structural_tag request_id cache_salt",
    "CompletionRequest": _SAMPLING + "prompt prompt_embeds suffix",
    "EmbeddingCompletionRequest": "model input encoding_format dimensions user priority "
    "truncate_prompt_tokens additional_data add_special_tokens",
    "EmbeddingChatRequest": "model messages encoding_format dimensions user truncate_prompt_tokens "
    "additional_data add_special_tokens chat_template chat_template_kwargs mm_processor_kwargs "
    "priority",
    "ScoreRequest": "model text_1 text_2 truncate_prompt_tokens additional_data priority",
    "RerankRequest": "model query documents top_n truncate_prompt_tokens additional_data priority",
    "RerankDocument": "text",
    "RerankResult": "index document relevance_score",
    "RerankUsage": "total_tokens",
    "RerankResponse": "id model usage results",
    "CompletionLogProbs": "text_offset token_logprobs tokens top_logprobs",
    "CompletionResponseChoice": "index text logprobs finish_reason stop_reason prompt_logprobs",
    "CompletionResponse": _USAGE + " choices kv_transfer_params",
    "CompletionResponseStreamChoice": "index text logprobs finish_reason stop_reason",
    "CompletionStreamResponse": _USAGE + " choices",
    "EmbeddingResponseData": "index object embedding",
    "EmbeddingResponse": _USAGE + " data",
    "PoolingResponseData": "index object data",
    "PoolingResponse": _USAGE + " data",
    "ScoreResponseData": "index object score",
    "ScoreResponse": _USAGE + " data",
    "ClassificationRequest": "model input truncate_prompt_tokens user additional_data priority",
    "ClassificationData": "index label probs num_classes",
    "ClassificationResponse": _USAGE + " data",
    "FunctionCall": "name arguments",
    "ToolCall": "id type function",
    "DeltaFunctionCall": "name arguments",
    "DeltaToolCall": "id type index function",
    "ExtractedToolCallInformation": "tools_called tool_calls content",
    "ChatMessage": "role reasoning_content content tool_calls",
    "ChatCompletionLogProb": "token logprob bytes",
    "ChatCompletionLogProbsContent": "top_logprobs",
    "ChatCompletionLogProbs": "content",
    "ChatCompletionResponseChoice": "index message logprobs finish_reason stop_reason",
    "ChatCompletionResponse": _USAGE + " choices prompt_logprobs kv_transfer_params",
    "DeltaMessage": "role content reasoning_content tool_calls",
    "ChatCompletionResponseStreamChoice": "index delta logprobs finish_reason stop_reason",
    "ChatCompletionStreamResponse": _USAGE + " choices",
    "TranscriptionResponseStreamChoice": "delta finish_reason stop_reason",
    "TranscriptionStreamResponse": _USAGE + " choices",
    "BatchRequestInput": "custom_id method url body",
    "BatchResponseData": "status_code request_id body",
    "BatchRequestOutput": "id custom_id response error",
    "TokenizeCompletionRequest": "model prompt add_special_tokens return_token_strs",
    "TokenizeChatRequest": "model messages add_generation_prompt return_token_strs "
    "continue_final_message add_special_tokens chat_template chat_template_kwargs "
    "mm_processor_kwargs tools",
    "TokenizeResponse": "count max_model_len tokens token_strs",
    "DetokenizeRequest": "model tokens",
    "DetokenizeResponse": "prompt",
    "LoadLoRAAdapterRequest": "lora_name lora_path",
    "UnloadLoRAAdapterRequest": "lora_name lora_int_id",
    "TranscriptionRequest": "file model language prompt response_format timestamp_granularities "
    "stream stream_include_usage stream_continuous_usage_stats temperature top_p top_k min_p seed "
    "frequency_penalty repetition_penalty presence_penalty",
    "TranscriptionResponse": "text",
    "TranscriptionWord": "end start word",
    "TranscriptionSegment": "id avg_logprob compression_ratio end no_speech_prob seek start "
    "temperature text tokens",
    "TranscriptionResponseVerbose": "duration language text segments words",
}
"""Class of `vllm.entrypoints.openai.protocol` -> its fields."""

PROGRAMS = (
    *("vllm.entrypoints.openai.api_server", "vllm.entrypoints.openai.run_batch"),
    *("vllm.entrypoints.api_server", "vllm.entrypoints.cli.main"),
)
"""Modules that are run with `python -m`."""

LLM_METHODS: dict[str, str] = {
    "generate": "prompts sampling_params prompt_token_ids use_tqdm lora_request "
    "prompt_adapter_request guided_options_request priority",
    "chat": "messages sampling_params use_tqdm lora_request chat_template "
    "chat_template_content_format add_generation_prompt continue_final_message tools "
    "chat_template_kwargs mm_processor_kwargs",
    "beam_search": "prompts params lora_request",
    "encode": "prompts pooling_params prompt_token_ids truncate_prompt_tokens use_tqdm "
    "lora_request prompt_adapter_request",
    "embed": "prompts truncate_prompt_tokens use_tqdm pooling_params lora_request "
    "prompt_adapter_request",
    "classify": "prompts use_tqdm lora_request prompt_adapter_request",
    "score": "text_1 text_2 truncate_prompt_tokens use_tqdm lora_request prompt_adapter_request",
    "reward": "prompts truncate_prompt_tokens use_tqdm pooling_params lora_request "
    "prompt_adapter_request",
    "preprocess_chat": "messages lora_request chat_template chat_template_content_format "
    "add_generation_prompt continue_final_message tools chat_template_kwargs mm_processor_kwargs",
    "reset_prefix_cache": "device",
    "get_tokenizer": "lora_request",
    "set_tokenizer": "tokenizer",
    "get_default_sampling_params": "",
    "deprecate_legacy_api": "",
}
"""Method of `LLM` -> its parameters, in their order."""

ENGINE_ARGUMENTS = """
    model served_model_name tokenizer hf_config_path task skip_tokenizer_init enable_prompt_embeds
    tokenizer_mode trust_remote_code allowed_local_media_path download_dir load_format
    weights_load_device config_format dtype kv_cache_dtype seed max_model_len cuda_graph_sizes
    distributed_executor_backend pipeline_parallel_size tensor_parallel_size data_parallel_size
    data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_backend
    enable_expert_parallel max_parallel_loading_workers block_size enable_prefix_caching
    prefix_caching_hash_algo disable_sliding_window disable_cascade_attn use_v2_block_manager
    use_padding_aware_scheduling swap_space cpu_offload_gb gpu_memory_utilization
    max_num_batched_tokens max_num_partial_prefills max_long_partial_prefills
    long_prefill_token_threshold max_num_seqs max_num_prefill_seqs max_logprobs disable_log_stats
    revision code_revision rope_scaling rope_theta hf_token hf_overrides tokenizer_revision
    quantization enforce_eager max_seq_len_to_capture disable_custom_all_reduce
    tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config limit_mm_per_prompt
    mm_processor_kwargs disable_mm_preprocessor_cache enable_lora enable_lora_bias max_loras
    max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype lora_extra_vocab_size
    long_lora_scaling_factors enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token
    device num_scheduler_steps multi_step_stream_outputs ray_workers_use_nsight
    num_gpu_blocks_override num_lookahead_slots model_loader_extra_config ignore_patterns
    preemption_mode scheduler_delay_factor enable_chunked_prefill disable_chunked_mm_input
    disable_hybrid_kv_cache_manager guided_decoding_backend guided_decoding_disable_fallback
    guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties
    logits_processor_pattern speculative_config qlora_adapter_name_or_path
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
    disable_async_output_proc scheduling_policy scheduler_cls override_neuron_config
    override_pooler_config compilation_config worker_cls worker_extension_cls kv_transfer_config
    kv_events_config generation_config enable_sleep_mode override_generation_config model_impl
    split_qkv calculate_kv_scales additional_config enable_reasoning reasoning_parser
    use_tqdm_on_load pt_load_map_location enable_multimodal_encoder_data_parallel
    disable_log_requests
"""
"""Arguments of an engine: keywords of `LLM` and `EngineArgs`, and flags."""

SAMPLING_FIELDS = """
    n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p
    seed stop stop_token_ids bad_words ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
    logits_processors truncate_prompt_tokens output_kind guided_decoding logit_bias
    allowed_token_ids extra_args
"""
