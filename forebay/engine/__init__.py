"""The loop, the processes it lives in, and the two ways to use it from Python: `LLM` and `AsyncEngine`.

Fault points (`base.fault`), in the order a request meets them:

    engine.load           before the checkpoint is opened          the start fails
    engine.load_weights   at each quarter of the weights           the start fails
    engine.receive        a frame has arrived                      the engine dies
    engine.add            before a request is checked              that request fails
    engine.plan           before the scheduler plans               the engine dies
    engine.launch         before a step is launched                the step's requests fail
    engine.result         before a step's tokens are waited for    the step's requests fail
    engine.commit         before the scheduler learns of them      the engine dies
    engine.send           before updates are sent                  the engine dies
"""
