//! Looks idempotency records up, and settles what nobody knows: `idempotency --help`.

#![allow(unreachable_pub, reason = "a program has no public items")]

mod commands;
mod downstream;
mod flags;
mod output;
mod progress;
mod record;
mod store;

use std::process::ExitCode;

use clap::Parser as _;

use commands::{Failure, run};
use flags::Flags;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    // Wrong flags end the process with code 2.
    let flags = Flags::parse();
    match run(&flags).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if flags.json {
                eprintln!("{}", failure.to_json());
            } else {
                eprintln!("error: {failure}");
            }
            ExitCode::from(Failure::exit_code(&failure))
        }
    }
}
