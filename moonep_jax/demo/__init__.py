"""`python -m moonep_jax demo`: trains a character language model with mixture-of-experts layers on CPU devices.

text.py has the data, model.py the model, train.py the two training steps (expert-parallel and dense), run.py one run of
both, launch.py the processes, progress.py and report.py what is printed and plotted.
"""
