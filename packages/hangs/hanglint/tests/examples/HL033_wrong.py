def entropies(accelerator, entropy, mask):
    return accelerator.gather(entropy[mask])
