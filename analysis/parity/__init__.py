"""Rules of studies that ask whether QAT trains as BF16 does: mismatch, accuracy, reward, memory."""
