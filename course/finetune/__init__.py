"""Fine-tuning by LoRA: photos, training, and the command ``python -m course.finetune``."""
