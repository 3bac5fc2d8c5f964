//! What a cache makes of two heads.

use std::time::{Duration, SystemTime};

use hedgerow::config::Cache;
use hedgerow::policy::cache::{Asked, Candidate, Store, Times, Verdict, touched};
use hedgerow::policy::identity::{Passage, Place};
use hedgerow::wire::target::Scheme;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Response, StatusCode};
use tokio::time::Instant;

use crate::Target;
use crate::fields::fields;

/// The fields of a request, of its answer and of a 304, parted by empty lines: what is said not to be kept
/// is not, ages and bodies are what they can be, and a 304 leaves the body as it was.
pub const CACHE: Target = Target {
    check,
    inputs: 8_000,
    seeds: &[
        "cache-control: max-age=5, min-fresh=3\n\ncache-control: max-age=60, private=\"a, b\"\na: 1\n\nage: 9",
        "range: bytes=1-2\nif-range: \"x\"\n\netag: \"x\"\nage: 18446744073709551615\n\netag: W/\"x\"",
        "if-none-match: \"x\", W/\"y,z\"\n\netag: W/\"y,z\"\nvary: a, b\nexpires: 0\n\ncache-control: no-store",
        "range: bytes=-3\n\nCache-Control: ext=\"a\\\", no-store\", s-maxage=99999999999999999999\n\nvary: *",
        "cache-control: max-stale\n\ncache-control: no-store, must-understand\ndate: x\n\ndate: y",
        "a: 1\n\nlocation: ../../x?y#z\ncontent-location: //localhost:80/a/./b\n\n",
        "pragma: no-cache\nif-modified-since: Thu, 01 Jan 2026 00:00:00 GMT\n\n\
         last-modified: THURSDAY, 01-jan-26 00:00:00 gmt\nexpires: Thu Jan  1 00:05:00 2026\n\n",
    ],
};

const BODY: &[u8] = b"hello";

fn check(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.splitn(3, "\n\n").map(|part| fields(part.as_bytes()));
    let [request, answer, news] = [(); 3].map(|()| parts.next().unwrap_or_default());
    let target = PathAndQuery::from_static("/a/b?c");
    let place = Place {
        scheme: Scheme::Http,
        authority: "localhost:80",
        host: b"",
        passage: &Passage::NONE,
        pinned: None,
        target: &target,
    };
    let asked = Asked { method: &Method::GET, place, headers: &request };
    let cfg = Cache {
        ttl: Some(Duration::from_secs(7)),
        stale_if_error: Duration::from_secs(5),
        stale_while_revalidate: Duration::from_secs(5),
        max_bytes: 1 << 20,
        max_body: 1 << 10,
        vary: Vec::new(),
        is_shared: false,
    };
    let sent = Instant::now();
    let received = sent + Duration::from_secs(2);
    let times = Times { sent, received, wall: SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600) };

    assert!(touched(Asked { method: &Method::POST, ..asked }, StatusCode::OK, &answer).len() <= 3);
    let store = Store::new(cfg.max_bytes);
    for is_private in [false, true] {
        let candidate = Candidate::of(asked, StatusCode::OK, &answer, &cfg, is_private, times, &store);
        let Some(mut candidate) = candidate else { continue };
        assert!(!says_no_store(&answer), "what is said not to be kept was kept");
        assert!(candidate.push(BODY));
        let entry = candidate.complete();
        assert!(entry.age(received) >= Duration::from_secs(2));
        let refreshed = entry.refreshed(asked, &not_modified(&news), times);
        for entry in refreshed.iter().chain([&entry]) {
            assert_eq!(&entry.body()[..], BODY);
            for later in [0, 10, 1 << 40] {
                let now = received + Duration::from_secs(later);
                if entry.judge(asked, &cfg, now) == Verdict::Fresh && request.is_empty() {
                    assert!(entry.ttl(&cfg, now) >= 0, "a stale answer is taken for fresh");
                }
                entry.may_stand_in(cfg.stale_if_error, &request, &cfg, now);
                let given = entry.answer(asked, now);
                let length = given.headers().get("content-length").map(|length| length.to_str().unwrap());
                let is_whole = given.status() == StatusCode::NOT_MODIFIED || length.is_some();
                assert!(is_whole && length.is_none_or(|length| length == given.body().len().to_string()));
                assert!(
                    BODY.windows(given.body().len().max(1)).any(|part| part == given.body())
                        || given.body().is_empty()
                );
            }
        }
    }
}

/// A plain reading, for heads where nothing is quoted and nothing overrules it.
fn says_no_store(answer: &HeaderMap) -> bool {
    let lines = || answer.get_all("cache-control").iter().map(|line| line.as_bytes().to_ascii_lowercase());
    let is_plain = lines().all(|line| !line.contains(&b'"') && !has(&line, b"must-understand"));
    is_plain && lines().any(|line| has(&line, b"no-store"))
}

fn has(line: &[u8], directive: &[u8]) -> bool {
    line.split(|byte| *byte == b',').any(|member| member.trim_ascii() == directive)
}

fn not_modified(headers: &HeaderMap) -> http::response::Parts {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    *response.headers_mut() = headers.clone();
    response.into_parts().0
}
