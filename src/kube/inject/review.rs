//! One admission review, from bytes to answer, without a server around it.
//!
//! What the API server asks is answered even where there is nothing to do; only what is no review at all is an
//! error.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::patch::text_at;
use super::{Settings, Skip, Verdict, inject};

const API_VERSION: &str = "admission.k8s.io/v1";
/// What the API server may cut off, for each warning and for all of them together.
const LONGEST_WARNING: usize = 240;
const LONGEST_WARNINGS: usize = 4_000;
/// Of a pod that cannot be had as it is (RFC 9110 section 15.5.21).
const UNPROCESSABLE: u16 = 422;

/// A review that was answered.
#[derive(Debug, Clone, PartialEq)]
pub struct Reviewed {
    /// The body of the answer.
    pub response: Value,
    /// Namespace and name of the pod, as far as they are known then, for the log.
    pub pod: String,
    /// What became of it.
    pub verdict: Verdict,
}

/// A body that is no review, with what to say about it. The status is 400.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotAReview(String);

/// Answers the AdmissionReview in `body`. It changes nothing anywhere, so a dry run gets the same answer.
///
/// # Errors
/// The body is not an AdmissionReview of version v1 with a request that has a uid, or a pod is to be made and there
/// is none in it.
pub fn review(body: &[u8], settings: &Settings) -> Result<Reviewed, NotAReview> {
    let review: Value =
        serde_json::from_slice(body).map_err(|error| NotAReview(format!("the body is not JSON: {error}")))?;
    let version = text_at(&review, &["apiVersion"]).unwrap_or("none");
    if text_at(&review, &["kind"]) != Some("AdmissionReview") || version != API_VERSION {
        let kind = text_at(&review, &["kind"]).unwrap_or("none");
        let message = format!("expected an AdmissionReview of {API_VERSION}; found {kind} of {version}");
        return Err(NotAReview(message));
    }
    let request = review.get("request").filter(|request| request.is_object());
    let request = request.ok_or_else(|| NotAReview("the review has no request".into()))?;
    let uid = text_at(request, &["uid"]).filter(|uid| !uid.is_empty());
    let uid = uid.ok_or_else(|| NotAReview("the request has no uid".into()))?;
    let verdict = judge(request, settings)?;
    Ok(Reviewed { response: answer(uid, &verdict), pod: name(request), verdict })
}

/// Of a pod whose name is made later, the beginning.
fn name(request: &Value) -> String {
    let metadata = ["object", "metadata"];
    let own = |key| text_at(request, &[metadata[0], metadata[1], key]);
    let name = text_at(request, &["name"]).filter(|name| !name.is_empty());
    let name = name.or_else(|| own("name")).or_else(|| own("generateName")).unwrap_or("?");
    format!("{}/{name}", text_at(request, &["namespace"]).unwrap_or("?"))
}

fn judge(request: &Value, settings: &Settings) -> Result<Verdict, NotAReview> {
    let is_pod = text_at(request, &["kind", "kind"]) == Some("Pod")
        && text_at(request, &["kind", "group"]).unwrap_or_default().is_empty();
    let is_new = text_at(request, &["operation"]) == Some("CREATE")
        && text_at(request, &["subResource"]).unwrap_or_default().is_empty();
    if !(is_pod && is_new) {
        return Ok(Verdict::Skipped(Skip::NotANewPod));
    }
    let pod = request.get("object").filter(|object| object.is_object());
    let pod = pod.ok_or_else(|| NotAReview("the request is to make a pod, and has none".into()))?;
    Ok(inject(pod, text_at(request, &["namespace"]), settings))
}

fn answer(uid: &str, verdict: &Verdict) -> Value {
    let mut response = json!({ "uid": uid, "allowed": true });
    match verdict {
        Verdict::Injected { patch, warnings } => {
            response["patchType"] = "JSONPatch".into();
            response["patch"] = STANDARD.encode(patch.to_json().to_string()).into();
            if !warnings.is_empty() {
                response["warnings"] = bounded(warnings.iter().map(|warning| format!("hedgerow: {warning}")));
            }
        }
        // Nobody needs to be told what they did or asked for themselves.
        Verdict::Skipped(Skip::AlreadyInjected | Skip::Disabled | Skip::NotANewPod) => {}
        Verdict::Skipped(skip) => {
            response["warnings"] =
                bounded([format!("hedgerow: the pod is not injected: {skip}")].into_iter());
        }
        Verdict::Denied(reason) => {
            response["allowed"] = false.into();
            response["status"] = json!({ "code": UNPROCESSABLE, "reason": "Invalid", "message": format!("hedgerow: {reason}") });
        }
    }
    json!({ "apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response })
}

fn bounded(warnings: impl Iterator<Item = String>) -> Value {
    let mut left = LONGEST_WARNINGS;
    let cut = warnings.map(|warning| match warning.char_indices().nth(LONGEST_WARNING) {
        Some((end, _)) => format!("{}…", &warning[..end]),
        None => warning,
    });
    let fitting = cut.take_while(|warning| {
        left = left.saturating_sub(warning.len());
        left > 0
    });
    fitting.collect()
}
