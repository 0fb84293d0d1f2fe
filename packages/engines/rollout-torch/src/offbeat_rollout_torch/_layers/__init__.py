"""Parts of a decoder's layers: linear maps, a mixture of experts, the gated delta rule."""
