//! The description of the fan-out endpoint (OpenAPI 3.1), for tools that make clients and tests of it.

use bytes::Bytes;
use http::{Method, StatusCode};
use tokio::time::Instant;

use super::JSON;
use crate::error::Error;
use crate::pipeline::answer::{self, Answer, AnswerBody};
use crate::pipeline::found::Note;
use crate::pipeline::ledger::Ledger;
use crate::respond::headers::VIA;

/// Where it is.
pub const PATH: &str = "/v1/openapi.json";

const DOCUMENT: &str = include_str!("openapi.json");

/// Answers with the description.
pub fn answer(method: &Method, mut ledger: Ledger) -> Answer {
    if !matches!(*method, Method::GET | Method::HEAD) {
        return answer::refuse(Error::MethodNotAllowed { allow: "GET, HEAD" }, ledger, None);
    }
    ledger.answers(StatusCode::OK, None, Note::default(), Instant::now());
    ledger.sent(DOCUMENT.len());
    ledger.complete();
    let mut response = http::Response::new(AnswerBody::full(Bytes::from_static(DOCUMENT.as_bytes())));
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static(JSON));
    headers.insert(http::header::VIA, VIA);
    Answer::own(response, None)
}
