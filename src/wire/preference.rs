//! What a client would rather have, by a weighted list such as `Accept` (RFC 9110 section 12.4.2).

use http::header::{HeaderMap, HeaderName};

/// The offer that the field gives the most weight; of equal ones that which the field names first, and the first
/// of all where it says nothing or wants none of them: an answer that was not asked for is still one.
///
/// A type is named by itself, by its family (`text/*`) or by `*/*`; a language by itself, by one of its dialects
/// (`zh-CN` for `zh`) or by `*`.
pub fn best<'a>(headers: &HeaderMap, name: &HeaderName, offers: &[&'a str]) -> &'a str {
    let members = || {
        headers
            .get_all(name)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .map(Member::parse)
            .enumerate()
    };
    let mut best = (offers[0], (0_u16, usize::MAX));
    for offer in offers {
        // The most exact member speaks for an offer, and of those the first.
        let spoken = members()
            .filter_map(|(at, member)| Some((member.exactness(offer)?, at, member.weight)))
            .max_by_key(|(exactness, at, _)| (*exactness, usize::MAX - at));
        let Some((_, at, weight)) = spoken else { continue };
        let is_better = weight > best.1.0 || (weight == best.1.0 && at < best.1.1);
        if weight > 0 && is_better {
            best = (offer, (weight, at));
        }
    }
    best.0
}

struct Member<'a> {
    range: &'a str,
    /// Thousandths.
    weight: u16,
}

impl<'a> Member<'a> {
    fn parse(text: &'a str) -> Self {
        let mut parts = text.split(';').map(str::trim);
        let range = parts.next().unwrap_or_default();
        let weight = parts.find_map(|part| {
            let (name, value) = part.split_once('=')?;
            name.trim().eq_ignore_ascii_case("q").then(|| value.trim().parse::<f32>().ok())
        });
        let weight = match weight {
            None => 1.0,
            Some(weight) => weight.filter(|weight| (0.0..=1.0).contains(weight)).unwrap_or(0.0),
        };
        Self { range, weight: (weight * 1000.0) as u16 }
    }

    /// How exactly the member names the offer; `None` when it does not.
    fn exactness(&self, offer: &str) -> Option<u8> {
        let (range, offer) = (self.range.to_ascii_lowercase(), offer.to_ascii_lowercase());
        let is_prefix = |whole: &str, part: &str, sign: char| {
            whole.strip_prefix(part).is_some_and(|rest| rest.starts_with(sign))
        };
        if range == offer {
            return Some(3);
        }
        let family = range.strip_suffix("/*").is_some_and(|kind| is_prefix(&offer, kind, '/'));
        let dialect = !offer.contains('/') && is_prefix(&range, &offer, '-');
        if dialect || (family && range != "*/*") {
            return Some(2);
        }
        matches!(range.as_str(), "*" | "*/*").then_some(1)
    }
}

#[cfg(test)]
mod tests {
    use http::header;

    use super::*;

    fn choose<'a>(accept: &str, offers: &[&'a str]) -> &'a str {
        let headers = HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())]);
        best(&headers, &header::ACCEPT, offers)
    }

    #[test]
    fn the_most_weight_wins_and_of_equal_weights_the_first_named() {
        let offers = ["application/json", "text/event-stream"];
        for (accept, chosen) in [
            ("", 0),
            ("*/*", 0),
            ("text/html", 0),
            ("text/event-stream", 1),
            ("Text/Event-Stream; charset=utf-8", 1),
            ("application/json, text/event-stream", 0),
            ("text/event-stream, application/json", 1),
            ("application/json;q=0.5, text/event-stream;q=0.9", 1),
            ("text/event-stream;q=0.4, */*;q=0.5", 0),
            ("text/*, application/json;q=0.9", 1),
            ("text/event-stream;q=0", 0),
            ("application/json;q=0, */*", 1),
            ("application/json-seq, text/event-stream", 1),
            ("text/event-stream;q=NaN, application/json;q=x", 0),
        ] {
            assert_eq!(choose(accept, &offers), offers[chosen], "{accept:?}");
        }
    }

    #[test]
    fn a_language_is_named_by_its_kinds() {
        for (accept, chosen) in [
            ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
            ("en-US,en;q=0.9,zh;q=0.8", "en"),
            ("ZH", "zh"),
            ("de, *;q=0.1", "en"),
            ("zha", "en"),
        ] {
            assert_eq!(choose(accept, &["en", "zh"]), chosen, "{accept:?}");
        }
    }
}
