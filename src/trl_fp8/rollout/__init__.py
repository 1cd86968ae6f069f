"""vLLM as the rollout engine, colocated or a server: started, given weights, compared with the trainer."""
