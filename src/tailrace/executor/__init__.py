"""What runs a `StepPlan`: the real kernels (`openvino`) or virtual time (`modeled`)."""
