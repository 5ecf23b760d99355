"""Real vLLM (for CPUs) behind the client, the supervisor, and whole runs. `install.sh VENV` makes an environment for it; then
VLLM_EXECUTABLE=VENV/bin/vllm pytest -m vllm."""
