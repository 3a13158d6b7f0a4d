"""Prefill workers: they compute prompts, draw each first token, and send the KV to decode workers.

A worker of either role is one class, `Worker` (worker/worker.py); the files here are what makes it a prefill worker.

    settings and limits of a step     prefill_worker/config.py
    what a step prefers               prefill_worker/policy.py, over worker/scheduling/step_policy.py
    a step                            `Worker._step`: schedule, begin, wait, learn, post-process
    which requests are in it          worker/scheduling/scheduler.py
    the actor that Ray starts         cluster/deployments/workers.py
    sending KV                        `PromptSender` in worker/transfers.py, then kvtransfer/sender.py
    pulling prefixes                  `Pulls` in worker/transfers.py, then kvtransfer/receiver.py
"""
