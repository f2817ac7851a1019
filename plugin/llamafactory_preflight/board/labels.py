"""Labels of the elements that the plugin adds, in the form of the table that its language menu reads."""

from __future__ import annotations

from collections.abc import Mapping

from llamafactory_preflight.board.words import LANGUAGES


def _label(*texts: tuple[str, str]) -> dict[str, dict[str, str]]:
    return {
        lang: {"label": label, **({"info": info} if info else {})}
        for lang, (label, info) in zip(LANGUAGES, texts, strict=True)
    }


def _button(*texts: str) -> dict[str, dict[str, str]]:
    return {lang: {"value": text} for lang, text in zip(LANGUAGES, texts, strict=True)}


LABELS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "preflight_tier": _label(
        ("GPU memory tier", "Suggested: what was found here."),
        ("Класс видеопамяти", "Предложен найденный здесь."),
        ("显存档位", "已按本机给出建议。"),
        ("GPU 메모리 등급", "이 컴퓨터에 맞게 제안됨."),
        ("GPU メモリの区分", "このマシンに合わせた提案。"),
    ),
    "preflight_preset": _label(
        ("Hardware preset", "Choosing one fills the fields below; nothing starts."),
        ("Аппаратный пресет", "Выбор заполняет поля ниже; ничего не запускается."),
        ("硬件预设", "选择后自动填写下面的各项，不会启动训练。"),
        ("하드웨어 프리셋", "선택하면 아래 항목이 채워지며, 시작되지는 않습니다."),
        ("ハードウェアプリセット", "選ぶと下の項目が入力されます。学習は始まりません。"),
    ),
    "preflight_keep": _label(
        ("Keep my model and data", "If you have chosen any."),
        ("Сохранить мою модель и данные", "Если они уже выбраны."),
        ("保留我的模型和数据", "如果已经选择。"),
        ("내 모델과 데이터 유지", "이미 선택한 경우."),
        ("自分のモデルとデータを残す", "選択済みの場合。"),
    ),
    "preflight_undo": _button("Undo", "Отменить", "撤销", "실행 취소", "元に戻す"),
    "preflight_card": _label(
        ("Plan for GPU", "A card of this list, or its memory, like 24GiB."),
        ("Планировать для GPU", "Карта из списка или её память, например 24GiB."),
        ("按此显卡规划", "可选列表中的显卡，或填写显存，如 24GiB。"),
        ("계획할 GPU", "목록의 카드, 또는 24GiB처럼 메모리 크기."),
        ("計画対象の GPU", "一覧のカード、または 24GiB のようなメモリ量。"),
    ),
    "preflight_num_cards": _label(
        ("Number of GPUs", ""), ("Число GPU", ""), ("显卡数量", ""), ("GPU 수", ""), ("GPU の数", "")
    ),
    "preflight_sample": _button("Show a sample", "Показать пример", "查看样本", "샘플 보기", "サンプルを表示"),
}
