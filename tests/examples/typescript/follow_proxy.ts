// Lets Node's fetch follow HTTP_PROXY, HTTPS_PROXY and NO_PROXY before Node 24, for programs that know nothing of it.
import { EnvHttpProxyAgent, setGlobalDispatcher } from 'undici';

setGlobalDispatcher(new EnvHttpProxyAgent());
