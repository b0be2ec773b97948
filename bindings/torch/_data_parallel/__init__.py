"""The parts of `DataParallel`: batches that are split and joined, copies of the module, and threads that apply them."""
