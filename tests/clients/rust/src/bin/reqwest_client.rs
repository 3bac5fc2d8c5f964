//! reqwest with rustls and the roots of the system, which `SSL_CERT_FILE` stands for.

use clients::{ASKED, Case, Failure, PATIENCE, Seen, Stopwatch, serve};
use reqwest::{Client, Response, Version};

fn main() -> Result<(), Failure> {
    rustls::crypto::ring::default_provider().install_default().map_err(|_| "a provider already")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    serve(|case| runtime.block_on(carry_out(case)));
    Ok(())
}

async fn carry_out(case: &Case<'_>) -> Result<Seen, Failure> {
    let client = Client::builder().timeout(PATIENCE).build()?;
    if case.verb == "twice" {
        call(&client, case).await?;
    }
    call(&client, case).await
}

async fn call(client: &Client, case: &Case<'_>) -> Result<Seen, Failure> {
    let mut request = match case.verb {
        "post" => client.post(case.url).header("content-type", "application/json").body(ASKED),
        _ => client.get(case.url),
    };
    for (name, value) in &case.headers {
        request = request.header(*name, *value);
    }
    let mut events = Stopwatch::start();
    let mut response = request.send().await?;
    let mut body = String::new();
    while let Some(piece) = response.chunk().await? {
        let text = std::str::from_utf8(&piece)?;
        events.piece(text);
        body.push_str(text);
    }
    Ok(Seen { status: response.status().as_u16(), version: version(&response), body, events })
}

fn version(response: &Response) -> &'static str {
    if response.version() == Version::HTTP_2 { "2" } else { "1.1" }
}
