"""How fast it is: the speed of training and evaluation beside a straight-line twin, and the server under load."""
