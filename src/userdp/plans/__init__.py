"""What belongs to a plan (`plan.py`): the checks when it is made, and the words it is told in."""
