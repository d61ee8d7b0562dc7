// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Static programs that a command carries and runs in guests: the guest agent starts a shell that becomes the program, which leaves no file.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use crate::project::control::{Feed, Request};
use crate::project::peer;

/// Puts the program of $1 bytes that its input begins with where programs may be run, and becomes it. It stops when the input ends. The file is gone
/// before the program runs, and also where the shell is ended (TERM) while it writes the file.
const SCRIPT: &str = r#"size=$1; shift
for folder in /run /dev/shm /tmp /var/tmp; do
	program=$folder/.$0-$$
	{ printf '#!/bin/sh\n' >"$program" && chmod 700 "$program" && "$program"; } 2>/dev/null && break
	rm -f "$program"
	program=
done
[ "$program" ] || { echo "no folder for a program: /run, /dev/shm, /tmp and /var/tmp can't be written, or are mounted noexec" >&2; exit 1; }
trap 'rm -f "$program"' EXIT
trap 'exit 143' HUP INT TERM
head -c "$size" >"$program" || exit
exec 3<"$program" && rm -f "$program" && exec /proc/self/fd/3 "$@""#;
/// Bytes of a program that are sent at once.
const CHUNK: usize = 256 << 10;

/// A program that the caller carries.
#[derive(Clone, Copy, Debug)]
pub struct Carried {
    /// Its name in the guest, such as `tombolo-noise`.
    pub name: &'static str,
    /// A static program.
    pub bytes: &'static [u8],
}

impl Carried {
    /// The request that runs the program in a VM. [`Carried::send`] follows it, then the program's input.
    pub fn request(&self, vm: &str, arguments: &[String], env: Vec<String>) -> Request {
        let size = self.bytes.len().to_string();
        let words = ["/bin/sh", "-c", SCRIPT, self.name, &size].map(str::to_owned);
        Request::Exec {
            vm: vm.to_owned(),
            argv: words.into_iter().chain(arguments.iter().cloned()).collect(),
            env,
            dir: None,
            input: true,
            terminal: None,
        }
    }

    /// Sends the program. A supervisor that hangs up has said why on the other half of the connection.
    ///
    /// # Errors
    /// The supervisor has hung up.
    pub fn send(&self, socket: &UnixStream) -> std::io::Result<()> {
        self.bytes.chunks(CHUNK).try_for_each(|piece| peer::send(socket, &Feed::Input(BASE64.encode(piece))))
    }

    /// Sends the program while its output is read: the guest may take it slowly. The input stays open.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn send_meanwhile(self, socket: Arc<UnixStream>) -> std::io::Result<()> {
        crate::thread::start(self.name, move || drop(self.send(&socket))).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_guests_script_runs_a_program_from_its_input_and_leaves_nothing() {
        let program = "#!/bin/sh\necho \"$*\"\nread -r end\n";
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "carried", &program.len().to_string(), "--watch", "a b"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(program.as_bytes()).unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "--watch a b\n");
        // While it runs, too.
        let files = ["/run", "/dev/shm", "/tmp", "/var/tmp"]
            .map(|folder| format!("{folder}/.carried-{}", child.id()));
        assert!(files.iter().all(|file| !Path::new(file).exists()), "{files:?}");
        drop(input);
        child.wait().unwrap();
    }
}
