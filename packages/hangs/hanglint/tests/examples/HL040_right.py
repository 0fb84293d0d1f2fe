def embed(self, ids, pixel_values=None):
    embeddings = self.embed_tokens(ids)
    images = self.dummy_image if pixel_values is None else pixel_values
    weight = 0.0 if pixel_values is None else 1.0
    return embeddings + weight * self.visual(images)
