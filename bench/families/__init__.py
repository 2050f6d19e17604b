"""What several methods share: flows, estimators of gradients, curvature, generators of data."""
