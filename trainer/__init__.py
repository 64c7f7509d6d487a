"""The trainer: rank processes that turn complete groups into weight versions. Start reading at `step.py`."""
