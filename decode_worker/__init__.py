"""Decode workers: they receive prompts' KV, and write answers, a token of each request a step.

A worker of either role is one class, `Worker` (worker/worker.py); the files here are what makes it a decode worker.

    settings, preemption and swap     decode_worker/config.py
    what a step prefers               decode_worker/policy.py, over worker/scheduling/step_policy.py
    a step                            `Worker._step`: schedule, begin, wait, learn, post-process
    batch, preemption, drafts         worker/scheduling/scheduler.py, worker/speculator.py
    the actor that Ray starts         cluster/deployments/workers.py
    receiving KV                      `PromptReceiver` in worker/transfers.py, then kvtransfer/receiver.py
    tokens to the routers             worker/token_server.py
"""
