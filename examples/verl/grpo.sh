# What the scripts of all models share; they set MODEL, NAME, GPUS and EXTRA, and source this file.
# Run from the repository's root, where verl 0.9.1, vLLM 0.24 and this package are installed:
#   bash examples/verl/qwen3_8b.sh data    DAPO-Math-17k and AIME as parquet files, from the hub
#   bash examples/verl/qwen3_8b.sh check   what the command would run, or all that is refused in it
#   bash examples/verl/qwen3_8b.sh train   verl's checkpoints in $OUT
#   bash examples/verl/qwen3_8b.sh export  the last one as a packed NVFP4 checkpoint: $OUT/nvfp4
#   bash examples/verl/qwen3_8b.sh serve   vLLM's server with it
set -euo pipefail
DATA=${DATA:-data/dapo-math}
OUT=${OUT:-checkpoints/$NAME}

ACTOR=actor_rollout_ref.actor
ROLLOUT=actor_rollout_ref.rollout
COMMAND=(
    python -m verl.trainer.main_ppo
    +nvfp4@_global_=w4a16    # NVFP4 in rollouts, QAT in training; all other keys are verl's
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=32
    data.max_prompt_length=1024
    data.max_response_length=8192
    data.filter_overlong_prompts=true
    reward.custom_reward_function.path=experiments/verl/reward.py
    reward.custom_reward_function.name=compute_score
    algorithm.adv_estimator=grpo
    $ACTOR.ppo_mini_batch_size=32
    $ACTOR.use_dynamic_bsz=true
    $ACTOR.ppo_max_token_len_per_gpu=9216
    $ACTOR.optim.lr=1e-6
    $ACTOR.fsdp_config.param_offload=true
    $ACTOR.fsdp_config.optimizer_offload=true
    $ROLLOUT.name=vllm
    $ROLLOUT.n=16
    $ROLLOUT.tensor_model_parallel_size=1
    $ROLLOUT.gpu_memory_utilization=0.8
    $ROLLOUT.calculate_log_probs=true    # logs rollout_corr/k3_kl, the mismatch
    trainer.n_gpus_per_node="$GPUS"
    trainer.nnodes=1
    trainer.total_training_steps=500
    trainer.save_freq=50
    trainer.test_freq=50
    trainer.logger='[console, tensorboard]'
    trainer.default_local_dir="$OUT"
    "${EXTRA[@]}"
)

case "${1:-}" in
    data) python -m experiments.verl.data --study experiments/studies/qwen3.yaml --out "$DATA" ;;
    check) qat-core verl-check "${COMMAND[@]}" ;;
    train) "${COMMAND[@]}" ;;
    export)
        step=$(cat "$OUT/latest_checkpointed_iteration.txt")
        python -m verl.model_merger merge --backend fsdp \
            --local_dir "$OUT/global_step_$step/actor" --target_dir "$OUT/merged"
        qat-core convert "$OUT/merged" "$OUT/nvfp4" --recipe full
        qat-core verify "$OUT/nvfp4"
        ;;
    serve) vllm serve "$OUT/nvfp4" ;;
    *) sed -n '3,8s/^# *//p' "${BASH_SOURCE[0]}" && exit 2 ;;
esac
