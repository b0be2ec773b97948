"""The parts of the training loop (`horovodlike.torch.training_loop`): its hooks, its batches, and its reports."""
