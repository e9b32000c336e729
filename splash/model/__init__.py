"""The transformer: reading a checkpoint's configuration, loading its weights and running its layers.

`config` reads `config.json` and never imports torch, so that planning and the scheduler stay light.
"""
