"""Label selectors as the API server reads them."""


def is_selected(selector: dict, labels: dict) -> bool:
    wanted = selector.get("matchLabels", {}).items()
    return all(labels.get(key) == value for key, value in wanted) and all(
        holds(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def holds(expression: dict, labels: dict) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", [])
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"unknown operator {expression['operator']}")
