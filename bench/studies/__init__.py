"""What several tasks share: protocols, risk estimators, statistics of their results."""
