// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo cp`: files and folders between here and a guest, over a command's input and output. What arrives has a name of its own until it is
//! complete, on either side, and then takes the final one; so a copy that is interrupted leaves no half file under that.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use self::incoming::Incoming;
use self::tree::tar_of;
use super::client::living;
use crate::compose::Project;
use crate::project::control::{Event, Feed, Request};
use crate::project::peer;
use crate::project::session;

mod incoming;
mod tree;

/// Bytes sent at once.
const CHUNK: usize = 256 << 10;
/// Permission bits of a file, the set-id bits included.
const MODE: u32 = 0o7777;
/// The bits that make a program run as its owner. What a guest has made is nothing that a user of this host should run as another one.
const SET_ID: u32 = 0o6000;
/// The most bytes that are kept of what a guest says of an error.
const WORDS: usize = 16 << 10;

/// Takes a file ($2, mode $3) from the input to $1, or into that folder. A shell that is ended reports the programs that were ended with it, when
/// its reader has gone: without the trap SIGPIPE would end it before it has cleaned up.
const TAKE_FILE: &str = r#"target=$1
[ ! -d "$target" ] || target=${target%/}/$2
[ ! -L "$target" ] || target=$(readlink -f "$target") || exit
[ ! -e "$target" ] || [ -f "$target" ] || { echo "$target is there and is no file" >&2; exit 1; }
temporary=${target%/*}/.tombolo-cp-$$
trap 'rm -f "$temporary"' EXIT
trap 'exit 1' HUP INT TERM
trap '' PIPE
umask 077
cat >"$temporary" && chmod "$3" "$temporary" && mv -f "$temporary" "$target""#;

/// Takes a tar of a folder from the input to $1, into that folder under the name $2 if it is there already ("": its content), and what has the
/// same name there is replaced.
const TAKE_TREE: &str = r#"target=${1%/}
if [ -d "$target/" ]; then
	temporary=$target/.tombolo-cp-$$
	[ -z "$2" ] || target=$target/$2
else
	[ "$2" ] || { echo "$1 is no folder" >&2; exit 1; }
	temporary=${target%/*}/.tombolo-cp-$$
fi
trap 'rm -rf "$temporary"' EXIT
trap 'exit 1' HUP INT TERM
trap '' PIPE
mkdir "$temporary" && tar -x -o -p -f - -C "$temporary" || exit
if [ ! -e "$target/" ]; then
	[ ! -e "$target" ] || { echo "$target is there and is no folder" >&2; exit 1; }
	mv "$temporary" "$target"
	exit
fi
cd "$temporary" || exit
find . -type d -exec sh -c 'for d; do
	[ -d "$0/$d" ] || mkdir -m "$(stat -c %a "$d")" "$0/$d" || exit
done' "$target" {} + && find . ! -type d -exec sh -c 'for f; do mv -f "$f" "$0/$f" || exit; done' "$target" {} +"#;

/// Sends $1 after a line with its kind and mode; a folder only where $2 is "r", as a tar of its content.
const SEND: &str = r#"if [ -d "$1" ]; then
	[ "$2" ] || { echo "$1 is a folder; copy it with -r" >&2; exit 1; }
	echo "d $(stat -c %a "$1")"
	exec tar -c -f - -C "$1" .
fi
[ -f "$1" ] || { echo "$1: no such file" >&2; exit 1; }
echo "f $(stat -L -c %a "$1")"
exec cat "$1""#;

/// Sends $1 as a tar.
const SEND_TAR: &str = r#"path=${1%/}
exec tar -c -f - -C "${path%/*}/" "${path##*/}""#;

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// A path here.
    Here(PathBuf),
    /// A path in a VM.
    There { vm: String, path: String },
    /// A tar on the standard input or output.
    Tar,
}

impl End {
    /// "vm:PATH", "-" or a path here: one with a '/' before its first ':' is always that.
    fn parse(text: &str) -> anyhow::Result<End> {
        if text == "-" {
            return Ok(End::Tar);
        }
        match text.split_once(':') {
            Some((vm, path)) if !vm.is_empty() && !vm.contains('/') => {
                anyhow::ensure!(!path.is_empty(), "'{text}' has no path; write {vm}:/PATH");
                // The agent's own folder is the root.
                let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
                Ok(End::There { vm: vm.to_owned(), path })
            }
            _ => Ok(End::Here(text.into())),
        }
    }
}

/// Copies `from` to `to`, one of which is "vm:PATH".
///
/// # Errors
/// A file can't be read or written. Names it.
pub fn copy(project: &Project, from: &str, to: &str, recursive: bool) -> anyhow::Result<()> {
    match (End::parse(from)?, End::parse(to)?) {
        (End::Here(path), End::There { vm, path: target }) => send(project, &path, &vm, &target, recursive),
        (End::There { vm, path }, End::Here(target)) => receive(project, &vm, &path, &target, recursive),
        (End::Tar, End::There { vm, path }) => {
            let stdin = Box::new(io::stdin());
            run(project, &vm, TAKE_TREE, &[&path, ""], Some(stdin), &mut |_| Ok(()))
        }
        (End::There { vm, path }, End::Tar) => {
            run(project, &vm, SEND_TAR, &[&path], None, &mut |bytes| io::stdout().write_all(bytes))?;
            Ok(io::stdout().flush()?)
        }
        (End::There { .. }, End::There { .. }) => {
            anyhow::bail!("from one VM to another: tombolo cp {from} - | tombolo cp - {to}")
        }
        _ => anyhow::bail!("neither '{from}' nor '{to}' is in a VM; write VM:PATH for one of them"),
    }
}

fn send(project: &Project, path: &Path, vm: &str, target: &str, recursive: bool) -> anyhow::Result<()> {
    let unreadable = || format!("{} can't be read", path.display());
    let meta = fs::metadata(path).with_context(unreadable)?;
    let absolute = fs::canonicalize(path).with_context(unreadable)?;
    let name = path.file_name().or(absolute.file_name()).unwrap_or_default().to_string_lossy().into_owned();
    if meta.is_dir() {
        anyhow::ensure!(recursive, "{} is a folder; copy it with -r", path.display());
        let name = if name.is_empty() { "root" } else { &name };
        return run(project, vm, TAKE_TREE, &[target, name], Some(tar_of(absolute)?), &mut |_| Ok(()));
    }
    let file = File::open(path).with_context(unreadable)?;
    let mode = format!("{:o}", meta.permissions().mode() & MODE);
    run(project, vm, TAKE_FILE, &[target, &name, &mode], Some(Box::new(file)), &mut |_| Ok(()))
}

fn receive(project: &Project, vm: &str, path: &str, target: &Path, recursive: bool) -> anyhow::Result<()> {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let target = if target.is_dir() {
        anyhow::ensure!(
            !name.is_empty() && name != ".." && name != ".",
            "'{vm}:{path}' has no name; name the target"
        );
        target.join(name)
    } else {
        target.to_owned()
    };
    let target = place_of(target)?;
    let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut incoming = Incoming::new(folder, recursive);
    let flag = if recursive { "r" } else { "" };
    run(project, vm, SEND, &[path, flag], None, &mut |bytes| incoming.take(bytes))?;
    incoming.settle(&target).with_context(|| format!("{} can't be written", target.display()))
}

/// Where what is to have this name is put: a link to a file stays, and what is neither file nor folder is not replaced.
fn place_of(target: PathBuf) -> anyhow::Result<PathBuf> {
    let Ok(meta) = fs::metadata(&target) else { return Ok(target) };
    anyhow::ensure!(
        meta.is_file() || meta.is_dir(),
        "{} is there and is neither file nor folder; name another target",
        target.display()
    );
    if target.is_symlink() { Ok(fs::canonicalize(&target)?) } else { Ok(target) }
}

/// Runs a script in a VM with this input; `output` gets what it says.
///
/// # Errors
/// The script fails: its error output. The input or the output fails.
fn run(
    project: &Project,
    vm: &str,
    script: &str,
    arguments: &[&str],
    input: Option<Box<dyn Read + Send>>,
    output: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> anyhow::Result<()> {
    let argv =
        ["/bin/sh", "-c", script, "tombolo"].iter().chain(arguments).map(|a| (*a).to_owned()).collect();
    let request = Request::Exec {
        vm: vm.to_owned(),
        argv,
        env: Vec::new(),
        dir: None,
        input: input.is_some(),
        terminal: None,
    };
    let mut peer = living(project, &request)?;
    let why = Arc::new(Mutex::new(None));
    give_up_at_signal(peer.socket(), why.clone())?;
    if let Some(input) = input {
        feed(peer.socket(), input, why.clone())?;
    }
    let mut words = Vec::new();
    let mut code = None;
    loop {
        match peer.receive::<Event>() {
            Ok(Some(Event::Out { data })) => output(&BASE64.decode(data)?)?,
            Ok(Some(Event::Err { data })) => {
                words.extend(BASE64.decode(data)?);
                words.truncate(WORDS);
            }
            Ok(Some(Event::Exit { code: c })) => code = Some(c),
            Ok(Some(Event::Done)) => break,
            Ok(Some(Event::Failed { message })) => anyhow::bail!("{message}"),
            Ok(Some(_)) => {}
            ended => {
                if let Some(why) = why.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    return Err(why);
                }
                ended?;
                return Err(peer.broken("the supervisor died"));
            }
        }
    }
    let words = String::from_utf8_lossy(&words);
    anyhow::ensure!(code == Some(0), "the VM '{vm}': {}", words.trim());
    Ok(())
}

/// Closing the connection ends the script in the guest, which then removes what it had begun.
fn give_up(socket: &UnixStream, why: &Mutex<Option<anyhow::Error>>, error: anyhow::Error) {
    why.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    // It fails where the supervisor has gone.
    let _gone = socket.shutdown(std::net::Shutdown::Both);
}

fn give_up_at_signal(socket: Arc<UnixStream>, why: Arc<Mutex<Option<anyhow::Error>>>) -> anyhow::Result<()> {
    let signals = session::signals()?;
    crate::thread::start("signals", move || {
        if signals.wait() {
            give_up(&socket, &why, anyhow::anyhow!("interrupted; nothing has been copied"));
        }
    })?;
    Ok(())
}

fn feed(
    socket: Arc<UnixStream>,
    mut input: Box<dyn Read + Send>,
    why: Arc<Mutex<Option<anyhow::Error>>>,
) -> anyhow::Result<()> {
    crate::thread::start("input", move || {
        let mut buffer = vec![0; CHUNK];
        loop {
            let message = match input.read(&mut buffer) {
                Ok(0) => Feed::End,
                Ok(n) => Feed::Input(BASE64.encode(&buffer[..n])),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    return give_up(
                        &socket,
                        &why,
                        anyhow::Error::from(e).context("the source can't be read"),
                    );
                }
            };
            if peer::send(&socket, &message).is_err() || matches!(message, Feed::End) {
                return;
            }
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn an_end_is_in_a_vm_where_its_name_stands_before_a_colon() {
        let there = |vm: &str, path: &str| End::There { vm: vm.into(), path: path.into() };
        assert_eq!(End::parse("a:/etc/x").unwrap(), there("a", "/etc/x"));
        assert_eq!(End::parse("a:x:y").unwrap(), there("a", "/x:y"));
        assert_eq!(End::parse("./a:b").unwrap(), End::Here("./a:b".into()));
        assert_eq!(End::parse("/x/a:b").unwrap(), End::Here("/x/a:b".into()));
        assert_eq!(End::parse("-").unwrap(), End::Tar);
        assert!(End::parse("a:").unwrap_err().to_string().contains("write a:/PATH"));
    }

    /// Runs a script as the guest would.
    fn guest(script: &str, arguments: &[&str], input: &mut dyn Read) -> std::process::Output {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script, "tombolo"]).args(arguments);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        io::copy(input, &mut child.stdin.take().unwrap()).unwrap();
        child.wait_with_output().unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & MODE
    }

    /// A folder with a program, a link, and a folder with a file in it.
    fn tree(at: &Path) {
        fs::create_dir_all(at.join("sub")).unwrap();
        fs::write(at.join("run"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(at.join("run"), fs::Permissions::from_mode(0o4750)).unwrap();
        fs::set_permissions(at.join("sub"), fs::Permissions::from_mode(0o701)).unwrap();
        fs::write(at.join("sub/data"), vec![7; 3 << 20]).unwrap();
        std::os::unix::fs::symlink("/nowhere", at.join("link")).unwrap();
    }

    /// The set-id bit goes into a guest and does not come back.
    fn assert_tree(at: &Path, set_id: u32) {
        assert_eq!((mode(&at.join("run")), mode(&at.join("sub"))), (set_id | 0o750, 0o701));
        assert_eq!(fs::read(at.join("sub/data")).unwrap(), vec![7; 3 << 20]);
        assert_eq!(fs::read_link(at.join("link")).unwrap(), Path::new("/nowhere"));
    }

    fn names(at: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(at).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_gets_its_mode_and_goes_into_a_folder_under_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        for (target, at) in [(format!("{path}/new"), "new"), (path.to_owned(), "name")] {
            let output = guest(TAKE_FILE, &[&target, "name", "4751"], &mut &b"content"[..]);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(fs::read(dir.path().join(at)).unwrap(), b"content");
            assert_eq!(mode(&dir.path().join(at)), 0o4751);
        }
        assert_eq!(names(dir.path()), ["name", "new"]);
        let output = guest(TAKE_FILE, &[&format!("{path}/none/x"), "x", "644"], &mut io::empty());
        assert!(!output.status.success());
    }

    #[test]
    fn links_to_files_stay_and_devices_and_pipes_are_not_replaced_on_either_side() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let pipe = std::ffi::CString::new(path("pipe")).unwrap();
        // SAFETY: the name is a string that ends with a zero byte.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        fs::write(path("file"), "old").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        std::os::unix::fs::symlink("none", path("dangling")).unwrap();
        let output = guest(TAKE_FILE, &[&path("link"), "link", "640"], &mut &b"new"[..]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(fs::read(path("file")).unwrap(), b"new");
        assert_eq!(fs::read_link(path("link")).unwrap(), Path::new("file"));
        let refused = guest(TAKE_FILE, &[&path("pipe"), "pipe", "640"], &mut io::empty());
        assert!(String::from_utf8_lossy(&refused.stderr).contains("pipe is there and is no file"));
        assert_eq!(place_of(path("link").into()).unwrap(), fs::canonicalize(path("file")).unwrap());
        assert_eq!(place_of(path("dangling").into()).unwrap(), Path::new(&path("dangling")));
        for special in [path("pipe"), "/dev/null".to_owned()] {
            let e = place_of(special.clone().into()).unwrap_err().to_string();
            assert!(e.contains(&special) && e.contains("is neither file nor folder"), "{e}");
        }
        assert_eq!(names(dir.path()), ["dangling", "file", "link", "pipe"]);
    }

    #[test]
    fn a_folder_that_can_not_be_unpacked_is_told_with_the_reason() {
        let here = tempfile::tempdir().unwrap();
        let mut incoming = Incoming::new(here.path(), true);
        incoming.take(b"d 755\n").unwrap();
        let e = (0..1000).find_map(|_| incoming.take(&[b'x'; 1 << 16]).err()).unwrap().to_string();
        assert!(e.contains("can't be written in") && !e.contains("Broken pipe"), "{e}");
        drop(incoming);
        assert_eq!(names(here.path()), Vec::<String>::new());
    }

    #[test]
    fn a_guest_that_sends_a_folder_where_a_file_was_asked_for_is_refused() {
        let here = tempfile::tempdir().unwrap();
        let mut incoming = Incoming::new(here.path(), false);
        let e = incoming.take(b"d 755\n").unwrap_err().to_string();
        assert!(e.contains("the guest sends something else"), "{e}");
        assert_eq!(names(here.path()), Vec::<String>::new());
    }

    #[test]
    fn a_guest_whose_copy_is_ended_keeps_the_file_that_was_there_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("x");
        fs::write(&target, "before").unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", TAKE_FILE, "tombolo", target.to_str().unwrap(), "x", "644"]);
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        drop(child.stderr.take());
        input.write_all(&[1; 1 << 16]).unwrap();
        while names(dir.path()).len() < 2 {
            std::thread::yield_now();
        }
        // As the guest ends a command: all of its processes at once.
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
        for pid in children.split_whitespace().map(|pid| pid.parse().unwrap()).chain([child.id()]) {
            let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        }
        drop(input);
        assert!(!child.wait().unwrap().success());
        assert_eq!(
            (names(dir.path()), fs::read(&target).unwrap()),
            (vec!["x".to_owned()], b"before".to_vec())
        );
    }

    #[test]
    fn a_folder_arrives_with_its_modes_and_links_or_is_merged_into_one_that_is_there() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        tree(&here.path().join("src"));
        let target = there.path().join("dst");
        let send = |target: &Path| {
            let mut tar = tar_of(here.path().join("src")).unwrap();
            let output = guest(TAKE_TREE, &[target.to_str().unwrap(), "src"], &mut tar);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        send(&target);
        assert_tree(&target, 0o4000);
        // Into it, as it is a folder now, twice: the second time over what is there.
        send(&target);
        fs::write(target.join("src/run"), "old").unwrap();
        fs::write(target.join("src/own"), "kept").unwrap();
        send(&target);
        assert_tree(&target.join("src"), 0o4000);
        assert_eq!(names(&target), ["link", "run", "src", "sub"]);
        assert_eq!(fs::read(target.join("src/own")).unwrap(), b"kept");
    }

    fn arrive(sent: &[u8], folder: &Path, target: &Path) -> anyhow::Result<()> {
        let mut incoming = Incoming::new(folder, true);
        for chunk in sent.chunks(1000) {
            incoming.take(chunk)?;
        }
        incoming.settle(target)
    }

    #[test]
    fn files_and_folders_come_from_a_guest_with_their_modes() {
        let (there, here) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        tree(&there.path().join("src"));
        let path = |name: &str| there.path().join(name).to_str().unwrap().to_owned();
        let sent = guest(SEND, &[&path("src/run"), ""], &mut io::empty());
        arrive(&sent.stdout, here.path(), &here.path().join("run")).unwrap();
        assert_eq!(
            (fs::read(here.path().join("run")).unwrap(), mode(&here.path().join("run"))),
            (b"#!/bin/sh\n".to_vec(), 0o750)
        );
        let sent = guest(SEND, &[&path("src"), "r"], &mut io::empty());
        for _ in 0..2 {
            arrive(&sent.stdout, here.path(), &here.path().join("copy")).unwrap();
            assert_tree(&here.path().join("copy"), 0);
        }
        assert_eq!(names(here.path()), ["copy", "run"]);
        let refused = guest(SEND, &[&path("src"), ""], &mut io::empty());
        assert!(String::from_utf8_lossy(&refused.stderr).contains("is a folder; copy it with -r"));
        let tar = guest(SEND_TAR, &[&path("src")], &mut io::empty()).stdout;
        let into = here.path().join("into");
        fs::create_dir(&into).unwrap();
        assert!(guest(TAKE_TREE, &[into.to_str().unwrap(), ""], &mut &tar[..]).status.success());
        assert_tree(&into.join("src"), 0o4000);
    }

    /// A user whose own folders may refuse him. The kernel asks each thread for its user id.
    fn as_user<T: Send>(user: u32, work: impl FnOnce() -> T + Send) -> T {
        let ids = || {
            // SAFETY: the calls change the ids of this thread alone, which ends after the work.
            unsafe {
                assert_eq!(libc::syscall(libc::SYS_setresgid, user, user, user), 0);
                assert_eq!(libc::syscall(libc::SYS_setresuid, user, user, user), 0);
            }
            work()
        };
        std::thread::scope(|scope| scope.spawn(ids).join().unwrap())
    }

    #[test]
    fn folders_that_their_owner_may_not_write_to_come_from_a_guest_twice_and_a_copy_that_fails_leaves_none() {
        const USER: u32 = 54_343;
        let there = tempfile::tempdir().unwrap();
        let source = there.path().join("src");
        fs::create_dir_all(source.join("closed/inner")).unwrap();
        fs::write(source.join("closed/inner/data"), "data").unwrap();
        for folder in ["closed/inner", "closed", ""] {
            fs::set_permissions(source.join(folder), fs::Permissions::from_mode(0o555)).unwrap();
        }
        let sent = guest(SEND, &[source.to_str().unwrap(), "r"], &mut io::empty()).stdout;
        let here = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(here.path(), Some(USER), Some(USER)).unwrap();
        let target = here.path().join("copy");
        as_user(USER, || {
            fs::create_dir(&target).unwrap();
            arrive(&sent, here.path(), &target).unwrap();
            assert_eq!(fs::read(target.join("closed/inner/data")).unwrap(), b"data");
            assert_eq!((mode(&target.join("closed")), mode(&target.join("closed/inner"))), (0o555, 0o555));
            // There, a file is in the way of a folder.
            let other = here.path().join("other");
            fs::create_dir(&other).unwrap();
            fs::write(other.join("closed"), "").unwrap();
            assert!(arrive(&sent, here.path(), &other).is_err());
        });
        assert_eq!(names(here.path()), ["copy", "other"]);
    }

    #[test]
    fn what_a_guest_sends_stays_in_the_folder_that_was_named() {
        let here = tempfile::tempdir().unwrap();
        let folder = here.path().join("inner");
        fs::create_dir(&folder).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..9].copy_from_slice(b"../outer\0");
        header.set_size(1);
        header.set_mode(0o644);
        header.set_cksum();
        tar.append(&header, &b"x"[..]).unwrap();
        let mut sent = b"d 755\n".to_vec();
        sent.extend(tar.into_inner().unwrap());
        arrive(&sent, &folder, &folder.join("copy")).unwrap();
        assert_eq!((names(here.path()), names(&folder.join("copy"))), (vec!["inner".to_owned()], Vec::new()));
        // A file that was cut short gets no name.
        assert!(arrive(b"f 6", &folder, &folder.join("cut")).is_err());
        assert!(!folder.join("cut").exists());
    }
}
