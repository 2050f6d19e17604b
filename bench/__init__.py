"""posterior-bench: which approximation of a Bayesian neural network's posterior deserves trust?"""

__version__ = "0.1.0"
