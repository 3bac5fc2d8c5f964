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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use serde_json::Value;

    use super::super::plan::{MOST_CALLS, Plan};
    use super::*;
    use crate::config;

    fn document() -> Value {
        serde_json::from_str(DOCUMENT).unwrap()
    }

    fn plan(fanout: &str) -> Result<Plan, String> {
        let limits = config::parse("{}", Path::new("")).unwrap().config.limits;
        Plan::read(fanout.as_bytes(), &limits)
    }

    /// The refusal of an unknown key names all that there are.
    fn known_keys(fanout: &str) -> BTreeSet<String> {
        let refusal = plan(fanout).unwrap_err();
        let (_, keys) = refusal.split_once("expected one of ").unwrap_or_else(|| panic!("{refusal}"));
        keys.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn it_tells_of_the_endpoints_that_there_are_in_the_version_that_it_is_written_in() {
        let document = document();
        assert_eq!(document["openapi"], "3.1.0");
        let paths: Vec<&String> = document["paths"].as_object().unwrap().keys().collect();
        assert_eq!(paths, [super::super::PATH, PATH]);
        let version = document["info"]["version"].as_str().unwrap();
        for path in paths {
            assert!(super::super::serves(path) && path.starts_with(&format!("/v{version}/")), "{path}");
        }
    }

    #[test]
    fn its_request_has_the_keys_that_a_plan_knows() {
        let schemas = &document()["components"]["schemas"];
        for (schema, fanout) in [("FanOut", r#"{"?": 0}"#), ("Call", r#"{"calls": [{"?": 0}]}"#)] {
            let schema = &schemas[schema];
            let described: BTreeSet<String> =
                schema["properties"].as_object().unwrap().keys().cloned().collect();
            assert_eq!(described, known_keys(fanout));
            assert_eq!(schema["additionalProperties"], false);
        }
    }

    #[test]
    fn its_bounds_and_defaults_are_those_of_a_plan() {
        let schemas = &document()["components"]["schemas"];
        let (fanout, one) = (&schemas["FanOut"]["properties"], &schemas["Call"]["properties"]);
        assert_eq!(fanout["calls"]["maxItems"], MOST_CALLS);
        let plan = plan(r#"{"calls": [{"id": "a", "url": "http://a.example/"}]}"#).unwrap();
        let [planned] = &*plan.calls else { panic!("{plan:?}") };
        let ask = planned.ask.as_ref().unwrap();
        assert_eq!(fanout["max_concurrent"]["default"], plan.max_concurrent);
        assert!(fanout["grace_ms"].get("default").is_none() && plan.grace.is_none());
        assert_eq!(fanout["system_prompt"]["default"], plan.wants_prompt);
        assert_eq!(one["optional"]["default"], planned.is_optional);
        assert_eq!(one["method"]["default"], ask.method.as_str());
        assert_eq!(one["max_body_bytes"]["default"], ask.max_body);
    }

    #[test]
    fn an_integer_is_one_however_it_is_written() {
        let with = |number: &str| {
            plan(&format!(
                r#"{{"calls": [{{"id": "a", "url": "http://a.example/", "max_body_bytes": {number}}}]}}"#
            ))
        };
        for number in ["20", "20.0", "2e1"] {
            assert_eq!(with(number).unwrap().calls[0].ask.as_ref().unwrap().max_body, 20, "{number}");
        }
        // Too much for this call, and no fault of the list.
        for number in ["16777217", "1e9", "36893488147419103232", "1961756833128473.0"] {
            let plan = with(number).unwrap();
            let fault = plan.calls[0].ask.as_ref().unwrap_err();
            assert!(fault.starts_with("calls[0].max_body_bytes: expected at most"), "{number}: {fault}");
        }
        for value in ["-1", "-1.0", "0.5", r#""20""#, "[20]"] {
            let fault = with(value).unwrap_err();
            assert!(fault.contains("expected a whole number"), "{value}: {fault}");
        }
    }
}
