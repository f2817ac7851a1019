"""What the plugin says in LLaMA-Board, in the board's five languages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources

from llamafactory_preflight.phrases import filled


LANGUAGES = ("en", "ru", "zh", "ko", "ja")

TEXTS: Mapping[str, tuple[str, ...]] = {
    # the verdict
    "fits": ("Fits", "Помещается", "放得下", "들어감", "収まります"),
    "tight": ("Tight", "Впритык", "比较紧张", "빠듯함", "ぎりぎりです"),
    "will_not_fit": ("Will not fit", "Не помещается", "放不下", "들어가지 않음", "収まりません"),
    "unknown": ("Cannot tell", "Нельзя сказать", "无法判断", "알 수 없음", "判断できません"),
    "needs": (
        "needs {need} ({low} to {high}), and {free} are free on {place}.",
        "нужно {need} (от {low} до {high}), свободно {free}: {place}.",
        "需要 {need}（{low} 至 {high}），{place} 可用 {free}。",
        "{need} 필요 ({low}~{high}), {place} 여유 {free}.",
        "必要 {need}（{low}～{high}）、{place} の空き {free}。",
    ),
    "needs_host": (
        "a run on the CPU needs about {need}, and {free} of main memory are available.",
        "для запуска на CPU нужно около {need}, доступно {free} оперативной памяти.",
        "在 CPU 上运行约需 {need}，可用内存 {free}。",
        "CPU 실행에 약 {need} 필요, 사용 가능한 메모리 {free}.",
        "CPU での実行には約 {need} が必要で、空きメモリは {free} です。",
    ),
    "no_remedy": (
        "No change known here makes it fit: it takes a smaller model or a larger card.",
        "Известные изменения не помогут: нужна модель поменьше или карта побольше.",
        "没有已知的修改能让它放下：需要更小的模型或更大的显卡。",
        "알려진 변경으로는 들어가지 않습니다. 더 작은 모델이나 더 큰 카드가 필요합니다.",
        "既知の変更では収まりません。より小さいモデルか大きいカードが必要です。",
    ),
    "error": ("error", "ошибка", "错误", "오류", "エラー"),
    "warning": ("warning", "предупреждение", "警告", "경고", "警告"),
    "info": ("note", "примечание", "提示", "참고", "注記"),
    "no_model": (
        "Choose a model or a preset to see what the run will take.",
        "Выберите модель или пресет, чтобы увидеть, сколько памяти займёт запуск.",
        "请选择模型或预设，即可看到本次训练需要多少显存。",
        "모델이나 프리셋을 선택하면 필요한 메모리가 표시됩니다.",
        "モデルまたはプリセットを選ぶと、必要なメモリが表示されます。",
    ),
    "asking": (
        "Asking the model hub for config.json …",
        "Запрашиваем config.json у хаба моделей …",
        "正在向模型仓库查询 config.json …",
        "모델 허브에서 config.json을 조회하는 중 …",
        "モデルハブに config.json を問い合わせています …",
    ),
    "faulty": (
        "Please check the settings.",
        "Проверьте настройки.",
        "请检查设置。",
        "설정을 확인하세요.",
        "設定を確認してください。",
    ),
    "fault": (
        "The memory panel has a fault, and training is not affected by it.",
        "В панели памяти произошла ошибка; на обучение она не влияет.",
        "显存面板出现故障，不影响训练。",
        "메모리 패널에 오류가 발생했지만 학습에는 영향이 없습니다.",
        "メモリパネルで障害が起きましたが、学習には影響しません。",
    ),
    # the bar
    "weights": ("weights", "веса", "权重", "가중치", "重み"),
    "adapters": ("adapters", "адаптеры", "适配器", "어댑터", "アダプター"),
    "gradients": ("gradients", "градиенты", "梯度", "그래디언트", "勾配"),
    "optimizer": ("optimizer", "оптимизатор", "优化器", "옵티마이저", "オプティマイザ"),
    "activations": ("activations", "активации", "激活值", "활성값", "活性値"),
    "logits": ("logits", "логиты", "logits", "로짓", "ロジット"),
    "buffers": ("buffers", "буферы", "缓冲区", "버퍼", "バッファ"),
    "on_top": ("saving or evaluation", "сохранение или оценка", "保存或评估", "저장 또는 평가", "保存または評価"),
    "slack": ("allocator slack", "запас аллокатора", "分配器余量", "할당자 여유분", "アロケータの余裕"),
    "context": ("CUDA context", "контекст CUDA", "CUDA 上下文", "CUDA 컨텍스트", "CUDA コンテキスト"),
    "nccl": ("NCCL",) * 5,
    "libraries": (
        "Python, libraries",
        "Python и библиотеки",
        "Python 与库",
        "Python, 라이브러리",
        "Python とライブラリ",
    ),
    "free": ("left free", "останется", "剩余", "남는 메모리", "残り"),
    "peak": ("peak", "пик", "峰值", "최대", "ピーク"),
    "needed": ("needed", "нужно", "需要", "필요", "必要"),
    "available": ("free now", "свободно", "可用", "여유", "空き"),
    "main_memory": ("main memory", "оперативная память", "内存", "메인 메모리", "メインメモリ"),
    "planned": ("{name}, planned", "{name}, план", "{name}（计划）", "{name} (계획)", "{name}（計画）"),
    "each_of": (
        "{name}, each of {num}",
        "{name}, каждая из {num}",
        "{name}，共 {num} 张",
        "{name}, {num}개 각각",
        "{name}、{num} 枚それぞれ",
    ),
    "gpu_peak": ("GPU peak", "пик GPU", "显存峰值", "GPU 최대", "GPU のピーク"),
    "this_machine": ("This machine", "Этот компьютер", "本机", "이 컴퓨터", "このマシン"),
    # remedies and changes
    "remedies": (
        "It fits with any one of these. A click sets the fields:",
        "Поместится с любым из этих изменений. Щелчок заполнит поля:",
        "采用以下任一修改即可放下，点击即填入：",
        "아래 중 하나면 들어갑니다. 누르면 입력됩니다:",
        "次のどれか一つで収まります。クリックすると入力されます:",
    ),
    "only_remedy": (
        "It fits with this. A click sets the fields:",
        "Поместится с этим изменением. Щелчок заполнит поля:",
        "采用以下修改即可放下，点击即填入：",
        "이렇게 하면 들어갑니다. 누르면 입력됩니다:",
        "次の変更で収まります。クリックすると入力されます:",
    ),
    "remedy": (
        "{set} → {size}; costs: {costs}",
        "{set} → {size}; цена: {costs}",
        "{set} → {size}；代价：{costs}",
        "{set} → {size}; 대가: {costs}",
        "{set} → {size}、代償: {costs}",
    ),
    "changed": (
        "Fields changed: {num}",
        "Изменено полей: {num}",
        "已修改 {num} 项",
        "변경된 항목: {num}",
        "変更された項目: {num}",
    ),
    "undone": (
        "The fields are as before.",
        "Поля восстановлены.",
        "已恢复原值。",
        "이전 값으로 되돌렸습니다.",
        "元の値に戻しました。",
    ),
    "unplaced": (
        "LLaMA-Board cannot be told these: {names}",
        "В LLaMA-Board это задать нельзя: {names}",
        "LLaMA-Board 无法设置：{names}",
        "LLaMA-Board에서 지정할 수 없음: {names}",
        "LLaMA-Board では指定できません: {names}",
    ),
    # starting
    "ask": (
        "Press Start again to start it all the same.",
        "Нажмите «Запустить» ещё раз, чтобы всё равно начать.",
        "再次点击“开始”即可仍然启动。",
        "그래도 시작하려면 시작 버튼을 다시 누르세요.",
        "それでも開始するには、もう一度「開始」を押してください。",
    ),
    "whole_output": ("Whole output", "Весь вывод", "完整输出", "전체 출력", "出力全文"),
    "measured": (
        "Last run, {what}: predicted {predicted}, measured {measured} ({difference}).",
        "Последний запуск, {what}: прогноз {predicted}, измерено {measured} ({difference}).",
        "上次训练，{what}：预测 {predicted}，实测 {measured}（{difference}）。",
        "지난 실행, {what}: 예측 {predicted}, 측정 {measured} ({difference}).",
        "前回の実行、{what}: 予測 {predicted}、実測 {measured}（{difference}）。",
    ),
    # template
    "template_right": (
        "The template matches {model}.",
        "Шаблон подходит для {model}.",
        "模板与 {model} 匹配。",
        "템플릿이 {model}에 맞습니다.",
        "テンプレートは {model} に合っています。",
    ),
    "template_wrong": (
        "{model} is trained with `{template}`, not with `{given}`.",
        "{model} обучают с `{template}`, а не с `{given}`.",
        "{model} 应使用 `{template}`，而不是 `{given}`。",
        "{model}에는 `{given}`이(가) 아니라 `{template}`을(를) 씁니다.",
        "{model} には `{given}` ではなく `{template}` を使います。",
    ),
    "template_unknown": (
        "It is not known here which template this model has.",
        "Неизвестно, какой шаблон у этой модели.",
        "不清楚该模型使用哪个模板。",
        "이 모델의 템플릿을 알 수 없습니다.",
        "このモデルのテンプレートは分かりません。",
    ),
    "template_use": (
        "Use {template}",
        "Выбрать {template}",
        "改用 {template}",
        "{template} 사용",
        "{template} を使う",
    ),
    "sample_waiting": (
        "Tokenizing the dataset; it takes some seconds …",
        "Токенизация набора данных, это займёт несколько секунд …",
        "正在对数据集分词，需要几秒 …",
        "데이터셋을 토큰화하는 중입니다 …",
        "データセットをトークン化しています …",
    ),
    "sample_counts": (
        "{tokens} tokens, {trained} of them trained (marked).",
        "{tokens} токенов, обучаются {trained} (выделены).",
        "{tokens} 个词元，其中 {trained} 个计算损失（已标出）。",
        "토큰 {tokens}개, 그중 {trained}개 학습(표시됨).",
        "{tokens} トークン、うち {trained} が学習対象（強調表示）。",
    ),
}


def say(key: str, lang: str | None, **values: object) -> str:
    """A text in the board's language; in English where the board is in another one or in none yet."""
    return TEXTS[key][_position(lang)].format(**values)


def said(text: str, lang: str | None) -> str:
    """What the rest of the plugin says in English, in the board's language as far as it is known there.

    Args:
        text: A sentence, mostly a `Phrase`, whose pattern names it in `phrases.json`.
        lang: The board's language.
    """
    position = _position(lang)
    if not position:
        return text
    pattern = getattr(text, "pattern", text)
    values: Mapping[str, object] = getattr(text, "values", {})
    translated = _phrases().get(pattern)
    return filled(
        translated[position - 1] if translated else pattern,
        {name: said(value, lang) if isinstance(value, str) else value for name, value in values.items()},
    )


@lru_cache(maxsize=1)
def _phrases() -> Mapping[str, list[str]]:
    """The sentences of other modules in the languages after English, by their English pattern."""
    text = resources.files(__package__).joinpath("phrases.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _position(lang: str | None) -> int:
    return LANGUAGES.index(lang) if lang in LANGUAGES else 0
