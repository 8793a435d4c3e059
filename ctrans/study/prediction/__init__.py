"""What the initial weights say of training, by a protocol that seals a third of the architectures before anything is trained."""
